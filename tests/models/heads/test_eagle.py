"""The EAGLE head equals a torch head that reads the same files, pass by pass."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxspec.errors import ConfigError, UnsupportedError
from jaxspec.models.backend import Backend
from jaxspec.models.heads import eagle
from jaxspec.models.heads.config import EagleConfig, read_head
from jaxspec.models.heads.weights import load_head
from jaxspec.models.matrices import DenseMatrix
from jaxspec.sharding import make_mesh
from tests.models.heads import torch_heads as theirs
from tests.models.heads.targets import target_config
from tests.models.heads.test_eagle3 import PAGE_SIZE, PASSES, rows_at


@partial(jax.jit, static_argnums=0)
def one_pass(config, params, batch, tokens, target, hidden, pages):
    embedded = eagle.embed(params, tokens, target)
    hidden, pages = eagle.forward(
        config, params, batch, embedded, hidden, pages, Backend()
    )
    return hidden, pages, eagle.logits(config, params, hidden, target)


@pytest.mark.parametrize(
    ("form", "has_bias", "has_embedding"),
    [
        ("speculators", False, False),
        ("papers", True, True),
        pytest.param("speculators", True, False, marks=pytest.mark.slow),
        pytest.param("papers", False, True, marks=pytest.mark.slow),
    ],
)
def test_prompt_and_later_passes_equal_torch(tmp_path, form, has_bias, has_embedding):
    random = torch.Generator().manual_seed(2)
    embedding = torch.randn(theirs.VOCAB, theirs.HIDDEN, generator=random)
    tensors, own_embedding = theirs.eagle_tensors(form, has_bias=has_bias), embedding
    if has_embedding:
        own_embedding = embedding.flip(0).contiguous()
        tensors["embed_tokens.weight"] = own_embedding
    theirs.write(tmp_path, theirs.eagle_config(form, fusion_bias=has_bias), tensors)
    config, params = load_head(
        tmp_path, target_config(), dtype=jnp.dtype(jnp.float32), mesh=make_mesh(1)
    )
    assert isinstance(config, EagleConfig)
    assert (config.has_bias, config.has_embedding) == (has_bias, has_embedding)

    count = 7
    wanted_hidden = torch.randn(count, theirs.HIDDEN, generator=random)
    tokens = torch.randint(theirs.VOCAB, (count + PASSES,), generator=random)
    pages = jnp.full((8, PAGE_SIZE, 2 * theirs.KV_HEADS, theirs.HEAD_DIM), jnp.nan)
    target = DenseMatrix(jnp.asarray(embedding.numpy()))
    hidden = eagle.fuse(config, params, [jnp.asarray(wanted_hidden.numpy())])
    first, rows = 0, count
    for _ in range(PASSES):
        # torch computes all rows of the sequence again; our head has the earlier rows'
        # keys and values in pages.
        wanted = theirs.eagle_rows(
            tensors, own_embedding[tokens[: len(wanted_hidden)]], wanted_hidden
        )
        given = jnp.asarray(tokens[first : first + rows].numpy(), jnp.int32)
        hidden, pages, found = one_pass(
            config, params, rows_at(first, rows), given, target, hidden, pages
        )
        np.testing.assert_allclose(found, (wanted @ embedding.T)[first:], atol=1e-4)
        # The last row's output replaces the target's hidden state in the next pass.
        wanted_hidden = torch.cat([wanted_hidden, wanted[-1:]])
        hidden, first, rows = hidden[-1:], first + rows, 1


@pytest.mark.parametrize(
    ("form", "change", "error", "named"),
    [
        ("speculators", dict(layernorms=True), UnsupportedError, "layernorms must be"),
        ("papers", dict(hidden_act="gelu"), UnsupportedError, "hidden_act must be"),
        ("papers", dict(vocab_size=64), ConfigError, "another target.*vocab_size=64"),
        ("papers", dict(hidden_size=32), ConfigError, "target_hidden_size=32, and"),
    ],
)
def test_unsupported_or_mismatched_heads_are_named(
    tmp_path, form, change, error, named
):
    config = theirs.eagle_config(form, **change)
    theirs.write(tmp_path, config, theirs.eagle_tensors(form))
    with pytest.raises(error, match=named):
        read_head(tmp_path)[0].check_target(target_config())


def test_head_needs_the_targets_width_and_vocabulary():
    """The head applies the target's output matrix to the output of its layer."""
    sizes: dict[str, Any] = dict(
        target_hidden_size=32,
        vocab_size=50,
        draft_vocab_size=50,
        hidden_size=24,
        intermediate_size=8,
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        has_embedding=True,
    )
    with pytest.raises(ConfigError, match="hidden_size must be target_hidden_size=32"):
        EagleConfig(**sizes)
    sizes |= dict(hidden_size=32, draft_vocab_size=20)
    with pytest.raises(ConfigError, match="draft_vocab_size must be vocab_size=50"):
        EagleConfig(**sizes)
