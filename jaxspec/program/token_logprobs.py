"""Log-probabilities of tokens in a result vector; `logprobs.py` computes them.

Plain numpy: the engine imports this without importing jax.
"""

import math
from typing import NamedTuple

import numpy as np


class TokenLogprobs(NamedTuple):
    """The model's own log-probabilities at places of tokens, before every control.

    The leading axes are those of the tokens. `own` is the token's, `rank` one more
    than the number of tokens that are more probable; `top_ids` and `top` are the most
    probable tokens, the best first, the lowest id first among equals.
    """

    own: np.ndarray  # float32 [...]
    rank: np.ndarray  # int32 [...]
    top_ids: np.ndarray  # int32 [..., N]
    top: np.ndarray  # float32 [..., N]


def num_columns(num_top: int) -> int:
    """Numbers that one token takes in the vector."""
    return 2 + 2 * num_top


def read_logprobs(
    vector: np.ndarray, leading: tuple[int, ...], num_top: int
) -> tuple[TokenLogprobs, np.ndarray]:
    """Take the tokens of shape `leading` off the vector; they and what comes after."""
    size = math.prod(leading) * num_columns(num_top)
    table = vector[:size].reshape(*leading, num_columns(num_top))
    found = TokenLogprobs(
        own=table[..., 0].view(np.float32),
        rank=table[..., 1],
        top_ids=table[..., 2 : 2 + num_top],
        top=table[..., 2 + num_top :].view(np.float32),
    )
    return found, vector[size:]
