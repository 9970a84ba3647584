"""The EAGLE-3 head equals a torch head that reads the same files, pass by pass."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxspec.models.backend import Backend
from jaxspec.models.batch import Region, TokenBatch
from jaxspec.models.heads import eagle3
from jaxspec.models.heads.config import Eagle3Config
from jaxspec.models.heads.weights import load_head
from jaxspec.models.matrices import DenseMatrix
from jaxspec.models.trimmed import LOWEST, to_target_vocab
from jaxspec.sharding import make_mesh
from tests.models.heads import torch_heads as theirs
from tests.models.heads.targets import target_config

PAGE_SIZE, PASSES = 4, 3
TABLE = np.array([[5, 2, 7, 0]], np.int32)


def rows_at(first: int, count: int) -> TokenBatch:
    """Return rows of one sequence, whose pages are in random order."""
    positions = np.arange(first, first + count)
    slots = TABLE[0][positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    region = Region(
        page_table=jnp.asarray(TABLE),
        kv_len=jnp.array([first + count], jnp.int32),
        num_queries=count,
    )
    return TokenBatch(
        tokens=jnp.zeros(count, jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        slot_mapping=jnp.asarray(slots, jnp.int32),
        regions=(region,),
    )


def write(folder: Path, form: str, **changes: Any) -> tuple[Path, Any, str]:
    if form == "speculators":
        layer, config = "layers.0.", theirs.speculators_config(**changes)
    else:
        layer, config = "midlayer.", theirs.specforge_config(**changes)
    tensors = theirs.eagle3_tensors(layer)
    return theirs.write(folder, config, tensors), tensors, layer


@partial(jax.jit, static_argnums=0)
def one_pass(config, params, batch, tokens, target, hidden, pages):
    embedded = eagle3.embed(params, tokens, target)
    hidden, pages = eagle3.forward(
        config, params, batch, embedded, hidden, pages, Backend()
    )
    logits = to_target_vocab(
        params, eagle3.logits(config, params, hidden), theirs.VOCAB
    )
    return hidden, pages, logits


@pytest.mark.parametrize(
    ("form", "norm_before_residual", "has_embedding"),
    [
        ("speculators", True, False),
        ("specforge", False, True),
        pytest.param("speculators", False, True, marks=pytest.mark.slow),
        pytest.param("specforge", True, False, marks=pytest.mark.slow),
    ],
)
def test_prompt_and_later_passes_equal_torch(
    tmp_path, form, norm_before_residual, has_embedding
):
    _, tensors, layer = write(tmp_path, form, norm_before_residual=norm_before_residual)
    random = torch.Generator().manual_seed(2)
    embedding = torch.randn(theirs.VOCAB, theirs.HIDDEN, generator=random)
    own_embedding = embedding
    if has_embedding:
        own_embedding = embedding.flip(0).contiguous()
        tensors["embed_tokens.weight"] = own_embedding
        read = theirs.speculators_config, theirs.specforge_config
        config = read[form == "specforge"](norm_before_residual=norm_before_residual)
        theirs.write(tmp_path, config, tensors)
    config, params = load_head(
        tmp_path, target_config(), dtype=jnp.dtype(jnp.float32), mesh=make_mesh(1)
    )
    assert isinstance(config, Eagle3Config)
    assert config.layers_of(target_config()) == (2, 3, 5)

    count = 7
    streams = torch.randn(3, count, theirs.HIDDEN, generator=random)
    tokens = torch.randint(theirs.VOCAB, (count + PASSES,), generator=random)
    wanted_hidden = torch.cat(list(streams), -1) @ tensors["fc.weight"].T
    pages = jnp.full((8, PAGE_SIZE, 2 * theirs.KV_HEADS, theirs.HEAD_DIM), jnp.nan)
    target = DenseMatrix(jnp.asarray(embedding.numpy()))
    hidden = eagle3.fuse(config, params, [jnp.asarray(one.numpy()) for one in streams])
    first, rows = 0, count
    for _ in range(PASSES):
        # torch computes all rows of the sequence again; our head has the earlier rows'
        # keys and values in pages.
        wanted = theirs.eagle3_rows(
            tensors,
            own_embedding[tokens[: len(wanted_hidden)]],
            wanted_hidden,
            norm_before_residual=norm_before_residual,
            layer=layer,
        )
        given = jnp.asarray(tokens[first : first + rows].numpy(), jnp.int32)
        hidden, pages, found = one_pass(
            config, params, rows_at(first, rows), given, target, hidden, pages
        )
        expected = theirs.eagle3_logits(tensors, wanted)[first:]
        said = np.where(found == LOWEST, -np.inf, found)
        np.testing.assert_allclose(said, expected, atol=1e-4)
        # The last row's output replaces the target's hidden state in the next pass.
        wanted_hidden = torch.cat([wanted_hidden, wanted[-1:]])
        hidden, first, rows = hidden[-1:], first + rows, 1
