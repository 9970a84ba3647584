"""Owns the speed-up that acceptance and cost allow, and the share of it reached.

A round of K drafts costs 1 + K c plain rounds, c being what one draft pass costs of a
target pass, and gives 1 + a_1 + a_1 a_2 + ... tokens, a_i being how often draft i is
accepted where those before it were (Leviathan et al. 2023, arXiv:2211.17192, theorem
3.8, with one rate per position instead of one for all). It takes the target's pass over
K + 1 positions to cost as much as over one: a bound for few sequences, and too generous
where the arithmetic and no longer the memory sets the pace.
"""

from collections.abc import Sequence


def expected_length(conditional_rates: Sequence[float]) -> float:
    """Tokens per round: 1 + a_1 + a_1 a_2 + ... + a_1 ... a_K."""
    length = reached = 1.0
    for rate in conditional_rates:
        reached *= rate
        length += reached
    return length


def speed_up_ceiling(conditional_rates: Sequence[float], cost_ratio: float) -> float:
    """S(a_1..a_K, c): the most that K drafts can bring, K being how many rates."""
    num_draft_tokens = len(conditional_rates)
    return expected_length(conditional_rates) / (1 + num_draft_tokens * cost_ratio)


def best_num_draft_tokens(
    conditional_rates: Sequence[float], cost_ratio: float
) -> tuple[int, float]:
    """The K, of those with a rate for every position, with the highest ceiling.

    Returns:
        K and its ceiling; (0, 1.0) where drafts can only lose.
    """
    ceilings = [
        speed_up_ceiling(conditional_rates[:k], cost_ratio)
        for k in range(len(conditional_rates) + 1)
    ]
    best = max(range(len(ceilings)), key=ceilings.__getitem__)
    return best, ceilings[best]
