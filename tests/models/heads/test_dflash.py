"""The DFlash drafter equals a torch drafter that reads the same files."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxspec.errors import ConfigError, UnsupportedError
from jaxspec.models.backend import Backend
from jaxspec.models.heads import dflash
from jaxspec.models.heads.config import DFlashConfig, read_head
from jaxspec.models.heads.weights import random_head
from jaxspec.models.matrices import DenseMatrix
from jaxspec.models.trimmed import LOWEST, to_target_vocab
from jaxspec.sharding import make_mesh
from tests.models.heads import torch_heads as theirs
from tests.models.heads.targets import (
    EMBEDDING,
    HEADS,
    PAGE_SIZE,
    RANDOM,
    load,
    rows_at,
    target_config,
)

NUM_PAGES = 8
OWN = theirs.zlab_config()["dflash_config"]


@partial(jax.jit, static_argnums=0)
def context_pass(config, params, batch, streams, pages):
    where = batch.positions, batch.slot_mapping
    return dflash.write_context(config, params, streams, *where, pages, Backend())


@partial(jax.jit, static_argnums=0)
def block_pass(config, params, batch, tokens, target, pages):
    embedded = dflash.embed(config, params, tokens, target)
    hidden, pages = dflash.forward(config, params, batch, embedded, pages, Backend())
    logits = dflash.logits(config, params, hidden, target)
    return to_target_vocab(params, logits, theirs.VOCAB), pages


@pytest.mark.parametrize("form", ["z-lab", "speculators"])
def test_blocks_equal_torch(tmp_path, form):
    """Files of z-lab use the target's matrices, those of speculators trim its head.

    Blocks of several lengths follow each other, as in rounds of a sequence: each
    overwrites the block before it, and only the last one is read.
    """
    RANDOM.manual_seed(2)
    content, tensors = theirs.zlab_config(), theirs.dflash_tensors()
    own_embedding, scale = EMBEDDING, 3.0
    if form == "z-lab":
        content["dflash_config"] |= dict(
            input_embedding_scale=scale, final_logit_softcapping=2.0
        )
    else:
        content, scale = theirs.dflash_speculators_config(), 1.0
        tensors = theirs.dflash_tensors(has_lm_head=True)
        own_embedding = EMBEDDING.flip(0).contiguous()
        tensors["embed_tokens.weight"] = own_embedding
    theirs.write(tmp_path, content, tensors)
    config, params = load(tmp_path)
    assert isinstance(config, DFlashConfig)
    assert config.target_layers == (2, 3, 5)
    assert config.windows == (None, theirs.WINDOW)
    assert config.max_draft_tokens == theirs.BLOCK - 1
    target = DenseMatrix(jnp.asarray(EMBEDDING.numpy()))
    shape = NUM_PAGES, PAGE_SIZE, 2 * theirs.KV_HEADS, theirs.HEAD_DIM
    pages = (jnp.full(shape, jnp.nan),) * 2
    streams = torch.randn(3, 12, theirs.HIDDEN, generator=RANDOM)
    known = 0
    for num_new, num_drafts in ((7, 4), (1, 4), (3, 2)):
        some = [jnp.asarray(one[known : known + num_new].numpy()) for one in streams]
        batch = rows_at(known, num_new)
        pages = context_pass(config, params, batch, some, pages)
        known += num_new
        tokens = torch.full((theirs.BLOCK,), theirs.MASK)
        tokens[0] = known
        batch = rows_at(known, theirs.BLOCK)
        # Masks past the wanted drafts have no slots.
        slots = batch.slot_mapping.at[num_drafts + 1 :].set(NUM_PAGES * PAGE_SIZE)
        batch = replace(batch, slot_mapping=slots)
        given = jnp.asarray(tokens.numpy(), jnp.int32)
        found, pages = block_pass(config, params, batch, given, target, pages)
        tokens = tokens[: num_drafts + 1]
        context = torch.cat(list(streams[:, :known]), -1)
        wanted = theirs.dflash_rows(tensors, context, scale * own_embedding[tokens])
        if form == "z-lab":
            wanted = 2 * torch.tanh(wanted @ EMBEDDING.T / 2)
        else:
            whole = torch.full((len(wanted), theirs.VOCAB), -torch.inf)
            ids = torch.arange(theirs.DRAFT_VOCAB) + tensors["d2t"]
            whole[:, ids] = wanted @ tensors["lm_head.weight"].T
            wanted = whole
        said = np.where(found == LOWEST, -np.inf, found)[: num_drafts + 1]
        np.testing.assert_allclose(said, wanted, atol=1e-4)


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    (
        dict(layer_types=["full_attention", "chunked_attention"]),
        "layer_types must be .* 'full_attention' or 'sliding_attention'",
    ),
    (
        dict(rope_parameters=dict(full_attention=dict(rope_type="linear"))),
        "rope_parameters must be .* or have 'sliding_attention' for a window",
    ),
    (
        dict(rope_parameters=dict(sliding_attention=dict(rope_type="linear"))),
        "rope_type must be 'default', got 'linear'",
    ),
    *(
        (dict(dflash_config=OWN | {name: value}), rf"{name} must be {allowed}")
        for name, value, allowed in (
            ("causal_head", True, "False, got True"),
            ("attention_modes", ["kda", "gqa"], r"\['gqa', 'gqa'\], got"),
            ("conv_kernel_size", 2, "left out, got 2"),
            ("causal", False, "left out, got False"),
            ("causal", True, "left out, got True"),
        )
    ),
    (
        dict(layer_types=None, sliding_window=None, is_causal=True),
        "is_causal must be false, got True",
    ),
    (
        dict(layer_types=["sliding_attention"] * 2, causal=False),
        "causal must be true, got False",
    ),
    (dict(attention_bias=True), "attention_bias must be False"),
    (dict(sliding_window_non_causal=True), "sliding_window_non_causal must be False"),
    (dict(projector_type="domino"), "projector_type must be 'dflash', got 'domino'"),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    (dict(dflash_config=dict(target_layer_ids=[1])), "mask_token_id.* the id of a"),
    (
        dict(dflash_config=dict(target_layer_ids=[1], mask_token_id=50)),
        "mask_token_id must be an integer from 0 to 49, got 50",
    ),
    (
        dict(dflash_config=dict(mask_token_id=1)),
        "target_layer_ids must be a list of layer numbers, got None",
    ),
    (dict(block_size=1), "block_size must be an integer"),
    (dict(layer_types=["full_attention"]), "layer_types must be"),
    (dict(layer_types=5), "layer_types must be a list of .*, got 5"),
    (
        dict(layer_types=None, max_window_layers=0),
        "layer_types must be .*, got None. use_sliding_window is true",
    ),
    *(
        (dict(input_embedding_scale=scale), "scale must be a finite number above 0")
        for scale in ("a", 0, False)
    ),
    (dict(num_target_layers="6"), "num_target_layers must be an integer.*got '6'"),
    (dict(aux_hidden_state_layer_ids=[1, 2, 4]), r"_ids must .*\[0, 1, 3\], one"),
    (dict(sliding_window=None), "sliding_window must be an integer"),
    (dict(num_target_layers=18), "num_target_layers=18, and .* has 6 layers"),
    (
        dict(
            num_target_layers=None,
            dflash_config=dict(target_layer_ids=[1, 9], mask_token_id=1),
        ),
        r"after layers \[2, 10\] \(counted from 1\), and the target has 6 layers",
    ),
    (dict(hidden_size=32), "target_hidden_size=32, and the target"),
    (dict(vocab_size=500), "vocab_size=500, and the target has 50"),
    (dict(draft_vocab_size=20), "no tensor 'd2t'"),
    (dict(architectures=["DFlash2DraftModel"]), "a head of kind 'dflash2'"),
    (dict(architectures=["Qwen3DSparkModel"]), "a head of kind 'dspark'"),
]


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [(changes, UnsupportedError, named) for changes, named in UNSUPPORTED]
    + [(changes, ConfigError, named) for changes, named in WRONG],
)
def test_wrong_files_are_named(tmp_path, changes, error, named):
    theirs.write(tmp_path, theirs.zlab_config(**changes), theirs.dflash_tensors())
    with pytest.raises(error, match=named):
        load(tmp_path)


def test_bits_of_the_context_do_not_depend_on_the_number_of_rows():
    """XLA:CPU sums the products of one row in another order than those of four."""
    config = replace(HEADS["dflash"], target_hidden_size=256, has_embedding=True)
    params = random_head(
        config, seed=1, dtype=jnp.dtype(jnp.float32), mesh=make_mesh(1)
    )
    params["fc"] = DenseMatrix(jnp.asarray(params["fc"].values))
    shape = NUM_PAGES, PAGE_SIZE, 2 * theirs.KV_HEADS, theirs.HEAD_DIM
    pages = (jnp.zeros(shape),) * 2
    streams = torch.randn(3, 4, 256, generator=RANDOM)
    one, four = (
        context_pass(
            config,
            params,
            rows_at(0, count),
            [jnp.asarray(stream[:count].numpy()) for stream in streams],
            pages,
        )
        for count in (1, 4)
    )
    page = rows_at(0, 1).slot_mapping[0] // PAGE_SIZE
    for few, many in zip(one, four, strict=True):
        assert few[page, 0].any()
        np.testing.assert_array_equal(few[page, 0], many[page, 0])
        assert not few.at[page, 0].set(0).any()


def test_full_attention_needs_no_window(tmp_path):
    changes = dict(
        layer_types=None,
        sliding_window=None,
        sliding_window_non_causal=True,
        is_causal=False,
        dflash_config=OWN | dict(causal=False),
    )
    theirs.write(tmp_path, theirs.zlab_config(**changes), theirs.dflash_tensors())
    config, _ = read_head(tmp_path)
    assert isinstance(config, DFlashConfig)
    assert config.windows == (None, None)
    config.check_target(target_config())


def test_settings_of_the_same_network_are_read():
    """Nested `rope_parameters` apply as in speculators: the window's to all layers."""
    ropes = dict(full_attention=1e6, sliding_attention=500.0)
    settings = dict(
        layer_types=["sliding_attention"] * 2,
        causal=True,
        aux_hidden_state_layer_ids=[2, 3, 5],
        rope_parameters={
            kind: dict(rope_type="default", rope_theta=theta)
            for kind, theta in ropes.items()
        },
        dflash_config=OWN | dict(attention_modes=["gqa"] * 2, causal_head=False),
    )
    config = DFlashConfig.from_file(theirs.zlab_config(**settings), ())
    assert config.windows == (theirs.WINDOW,) * 2
    assert config.target_layers == (2, 3, 5)
    assert config.rope_theta == 500
