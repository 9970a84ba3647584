"""The target of the heads in these tests, and other targets."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jaxspec.models.backend import Backend
from jaxspec.models.batch import TokenBatch
from jaxspec.models.families import config_from_hf
from jaxspec.models.heads.config import (
    DFlashConfig,
    Eagle3Config,
    EagleConfig,
    MedusaConfig,
)
from jaxspec.models.heads.weights import load_head
from jaxspec.models.matrices import DenseMatrix
from jaxspec.models.trimmed import LOWEST, to_target_vocab
from jaxspec.sharding import make_mesh
from tests.models.heads import torch_heads as theirs
from tests.support.oracles import sequence_batch

PAGE_SIZE, PASSES, COUNT = 4, 3, 7
RANDOM = torch.Generator().manual_seed(2)
EMBEDDING = torch.randn(theirs.VOCAB, theirs.HIDDEN, generator=RANDOM)


def target_config(**changes: Any) -> Any:
    sizes: dict[str, Any] = dict(model_type="gemma2", vocab_size=theirs.VOCAB)
    sizes |= dict(hidden_size=theirs.HIDDEN, intermediate_size=32)
    sizes |= dict(num_hidden_layers=theirs.LAYERS, head_dim=8)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2)
    return config_from_hf(sizes | changes)


HEADS = {
    "eagle": EagleConfig.from_file(theirs.eagle_config(), ()),
    "eagle3": Eagle3Config.from_file(theirs.speculators_config(), ()),
    "medusa": MedusaConfig(
        target_hidden_size=theirs.HIDDEN,
        vocab_size=theirs.VOCAB,
        draft_vocab_size=theirs.VOCAB,
        num_heads=3,
    ),
    "dflash": DFlashConfig.from_file(theirs.dflash_speculators_config(), ()),
}


def load(folder: Path, **options: Any) -> Any:
    given: dict[str, Any] = dict(dtype=jnp.dtype(jnp.float32), mesh=make_mesh(1))
    return load_head(folder, target_config(), **given | options)


def rows_at(first: int, count: int) -> TokenBatch:
    """Return rows of one sequence, whose pages are in random order."""
    zeros = np.zeros(count)
    return sequence_batch(zeros, [5, 2, 7, 0], page_size=PAGE_SIZE, start=first)


@partial(jax.jit, static_argnums=(0, 1))
def head_pass(module, config, params, batch, tokens, target, hidden, pages):
    """Run a pass of the functions in `eagle` or `eagle3`."""
    embedded = module.embed(params, tokens, target)
    given = batch, embedded, hidden, pages, Backend()
    hidden, pages = module.forward(config, params, *given)
    logits = module.logits(config, params, hidden, target)
    return hidden, pages, to_target_vocab(params, logits, theirs.VOCAB)


def check_passes(
    one_pass: Any,
    hidden: Any,
    wanted_hidden: torch.Tensor,
    own_embedding: torch.Tensor,
    rows_of: Any,
    logits_of: Any,
) -> None:
    """Compare a prompt's pass and the next with torch.

    torch computes all rows of the sequence again; our head has the earlier rows' keys
    and values in pages.
    """
    tokens = torch.randint(theirs.VOCAB, (COUNT + PASSES,), generator=RANDOM)
    pages = jnp.full((8, PAGE_SIZE, 2 * theirs.KV_HEADS, theirs.HEAD_DIM), jnp.nan)
    target = DenseMatrix(jnp.asarray(EMBEDDING.numpy()))
    first, rows = 0, COUNT
    for _ in range(PASSES):
        embedded = own_embedding[tokens[: len(wanted_hidden)]]
        wanted = rows_of(embedded, wanted_hidden)
        given = jnp.asarray(tokens[first : first + rows].numpy(), jnp.int32)
        hidden, pages, found = one_pass(
            rows_at(first, rows), given, target, hidden, pages
        )
        said = np.where(found == LOWEST, -np.inf, found)
        np.testing.assert_allclose(said, logits_of(wanted)[first:], atol=1e-4)
        # The last row's output replaces the target's hidden state in the next pass.
        wanted_hidden = torch.cat([wanted_hidden, wanted[-1:]])
        hidden, first, rows = hidden[-1:], first + rows, 1
