"""EAGLE and Medusa heads equal torch heads that read the same files."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxspec.errors import ConfigError, UnsupportedError
from jaxspec.models.heads import eagle, eagle3, medusa
from jaxspec.models.heads.config import (
    Eagle3Config,
    EagleConfig,
    MedusaConfig,
    read_head,
)
from jaxspec.models.heads.weights import load_head
from jaxspec.models.matrices import DenseMatrix
from jaxspec.models.network import build_network
from jaxspec.models.trimmed import LOWEST, to_target_vocab
from jaxspec.sharding import make_mesh
from tests.models.heads import torch_heads as theirs
from tests.models.heads.targets import (
    COUNT,
    EMBEDDING,
    HEADS,
    RANDOM,
    check_passes,
    head_pass,
    load,
    target_config,
)
from tests.support.oracles import (
    init_kv_pages,
    load_ours,
    make_gemma3,
    model_config,
    sequence_batch,
)

NUM_HEADS, BLOCKS = 3, 2
MEDUSA_RANDOM = torch.Generator().manual_seed(3)
ROWS = torch.randn(5, theirs.HIDDEN, generator=MEDUSA_RANDOM)


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
    RANDOM.manual_seed(2)
    tensors, own_embedding = theirs.eagle_tensors(form, has_bias=has_bias), EMBEDDING
    if has_embedding:
        own_embedding = EMBEDDING.flip(0).contiguous()
        tensors["embed_tokens.weight"] = own_embedding
    theirs.write(tmp_path, theirs.eagle_config(form, fusion_bias=has_bias), tensors)
    config, params = load(tmp_path)
    assert isinstance(config, EagleConfig)
    assert (config.has_bias, config.has_embedding) == (has_bias, has_embedding)
    wanted_hidden = torch.randn(COUNT, theirs.HIDDEN, generator=RANDOM)
    check_passes(
        partial(head_pass, eagle, config, params),
        eagle.fuse(config, params, [jnp.asarray(wanted_hidden.numpy())]),
        wanted_hidden,
        own_embedding,
        partial(theirs.eagle_rows, tensors),
        lambda wanted: wanted @ EMBEDDING.T,
    )


@pytest.mark.parametrize(
    ("form", "norm_before_residual", "has_embedding"),
    [
        ("speculators", True, False),
        ("specforge", False, True),
        ("qwen3", True, False),
        pytest.param("speculators", False, True, marks=pytest.mark.slow),
        pytest.param("specforge", True, False, marks=pytest.mark.slow),
    ],
)
def test_passes_of_eagle3_equal_torch(
    tmp_path, form, norm_before_residual, has_embedding
):
    RANDOM.manual_seed(2)
    layer, config_of = "layers.0.", theirs.speculators_config
    if form == "specforge":
        layer, config_of = "midlayer.", theirs.specforge_config
    is_qwen3 = form == "qwen3"
    tensors = theirs.eagle3_tensors(layer, has_qk_norm=is_qwen3)
    own_embedding = EMBEDDING
    if has_embedding:
        own_embedding = EMBEDDING.flip(0).contiguous()
        tensors["embed_tokens.weight"] = own_embedding
    norm = dict(norm_before_residual=norm_before_residual)
    content = config_of(**norm)
    if is_qwen3:
        content["transformer_layer_config"]["model_type"] = "qwen3"
    theirs.write(tmp_path, content, tensors)
    config, params = load(tmp_path)
    assert isinstance(config, Eagle3Config)
    assert config.has_qk_norm == is_qwen3
    assert config.layers_of(target_config()) == (2, 3, 5)
    streams = torch.randn(3, COUNT, theirs.HIDDEN, generator=RANDOM)
    check_passes(
        partial(head_pass, eagle3, config, params),
        eagle3.fuse(config, params, [jnp.asarray(one.numpy()) for one in streams]),
        torch.cat(list(streams), -1) @ tensors["fc.weight"].T,
        own_embedding,
        partial(theirs.eagle3_rows, tensors, layer=layer, **norm),
        partial(theirs.eagle3_logits, tensors),
    )


@pytest.mark.parametrize(("pad_rows", "is_trimmed"), [(1, True), (64, False)])
def test_specforge_head_reads_hidden_states_of_gemma3(tmp_path, pad_rows, is_trimmed):
    """Files for the 1B trim the vocabulary, those for 27B use the target's matrix."""
    model = make_gemma3(
        vocab_size=theirs.VOCAB, hidden_size=theirs.HIDDEN, num_hidden_layers=6
    )
    vocab_size = theirs.VOCAB + pad_rows
    sizes = dict(vocab_size=vocab_size)
    tensors = theirs.eagle3_tensors("midlayer.", pad_rows=pad_rows)
    if not is_trimmed:
        sizes |= dict(draft_vocab_size=vocab_size, reuse_target_lm_head=True)
        for name in ("lm_head.weight", "d2t", "t2d"):
            del tensors[name]
        tensors["embed_tokens.weight"] = torch.cat(
            [EMBEDDING, torch.full((pad_rows, theirs.HIDDEN), torch.nan)]
        )
    theirs.write(tmp_path, theirs.gemma3_config(**sizes), tensors)
    target = model_config(model)
    options: Any = dict(dtype=jnp.dtype(jnp.float32), mesh=make_mesh(1))
    config, params = load_head(tmp_path, target, **options)
    assert isinstance(config, Eagle3Config)
    assert config.vocab_size == theirs.VOCAB
    layers = config.layers_of(target)
    assert layers == (1, 3, 5)
    RANDOM.manual_seed(2)
    tokens = torch.randint(theirs.VOCAB, (COUNT,), generator=RANDOM)
    with torch.no_grad():
        states = model.model(tokens[None], output_hidden_states=True).hidden_states
    wanted = torch.cat([states[layer][0] for layer in layers], -1)
    network = jax.jit(
        lambda params, *given: build_network(target, params).forward(*given)[0].streams
    )
    streams = network(
        load_ours(model),
        sequence_batch(tokens.numpy(), [5, 2]),
        init_kv_pages(target, 8, 4, jnp.float32),
    )

    def logits_of(wanted: torch.Tensor) -> torch.Tensor:
        if is_trimmed:
            return theirs.eagle3_logits(tensors, wanted)
        return theirs.rms_norm(wanted, tensors["norm.weight"]) @ EMBEDDING.T

    check_passes(
        partial(head_pass, eagle3, config, params),
        eagle3.fuse(config, params, [streams[layer] for layer in layers]),
        wanted @ tensors["fc.weight"].T,
        EMBEDDING,
        partial(
            theirs.eagle3_rows, tensors, layer="midlayer.", norm_before_residual=False
        ),
        logits_of,
    )


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_size=24), "hidden_size must be target_hidden_size=32"),
        (dict(draft_vocab_size=20), "draft_vocab_size must be vocab_size=50"),
    ],
)
def test_head_needs_the_targets_width_and_vocabulary(changes, message):
    """The head applies the target's output matrix to the output of its layer."""
    config = HEADS["eagle"]
    assert isinstance(config, EagleConfig)
    wide = dict(target_hidden_size=32, hidden_size=32, has_embedding=True)
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(config, **wide | changes)


def medusa_logits(folder) -> tuple[MedusaConfig, list[np.ndarray]]:
    config, params = load(folder)
    assert isinstance(config, MedusaConfig)
    rows = medusa.forward(config, params, jnp.asarray(ROWS.numpy()))
    target, found = DenseMatrix(jnp.asarray(EMBEDDING.numpy())), []
    for head, one in enumerate(rows):
        logits = medusa.logits(config, params, head, one, target)
        found.append(np.asarray(to_target_vocab(params, logits, theirs.VOCAB)))
    return config, found


def vllm_config(**changes):
    content = dict(
        model_type="medusa",
        hidden_size=theirs.HIDDEN,
        vocab_size=theirs.VOCAB,
        num_heads=NUM_HEADS,
        num_hidden_layers=BLOCKS,
    )
    return content | changes


def blocks_of(tensors, head):
    """Return the blocks of a head with vLLM's names, which has no biases."""
    return [(tensors[f"blocks.{head}.layers.{n}.weight"], 0) for n in range(BLOCKS)]


@pytest.mark.parametrize("prefix", ["", "medusa_heads.", "papers"])
def test_reads_names_of_vllm_and_of_the_paper(tmp_path, prefix):
    is_papers = prefix == "papers"
    tensors = theirs.medusa_tensors(NUM_HEADS, BLOCKS, is_papers=is_papers)
    if is_papers:
        content = dict(medusa_num_heads=NUM_HEADS, medusa_num_layers=BLOCKS)
        content |= dict(hidden_size=theirs.HIDDEN, vocab_size=theirs.VOCAB)
        theirs.write(tmp_path, content, tensors)
        # The name of the file in the code of Medusa's paper.
        (tmp_path / "model.safetensors").rename(tmp_path / "medusa_lm_head.safetensors")
    else:
        named = {prefix + name: value for name, value in tensors.items()}
        theirs.write(tmp_path, vllm_config(), named)
    config, found = medusa_logits(tmp_path)
    assert (config.lm_heads, config.has_bias) == (NUM_HEADS, is_papers)
    for head in range(NUM_HEADS):
        name = f"lm_heads.{head}.weight"
        if not is_papers:
            blocks = blocks_of(tensors, head)
        else:
            names = [f"{head}.{n}.linear" for n in range(BLOCKS)]
            blocks = [
                (tensors[f"{one}.weight"], tensors[f"{one}.bias"]) for one in names
            ]
            name = f"{head}.{BLOCKS}.weight"
        wanted = theirs.medusa_logits(ROWS, blocks, tensors[name])
        np.testing.assert_allclose(found[head], wanted, atol=1e-4)


def test_shared_output_matrices_are_compared(tmp_path):
    tensors = theirs.medusa_tensors(NUM_HEADS, BLOCKS, is_papers=False)
    for head in range(1, NUM_HEADS):
        tensors[f"lm_heads.{head}.weight"] = tensors["lm_heads.0.weight"].clone()
    content = vllm_config(original_lm_head=True)
    config, found = medusa_logits(theirs.write(tmp_path / "same", content, tensors))
    assert config.lm_heads == 1 and len(found) == NUM_HEADS
    tensors[f"lm_heads.{NUM_HEADS - 1}.weight"][-1, -1] += 1
    with pytest.raises(ConfigError, match="lm_heads.2.weight and .* differ"):
        medusa_logits(theirs.write(tmp_path / "other", content, tensors))


@pytest.mark.parametrize("shared", ["file", "target", "trimmed"])
def test_heads_can_share_one_output_matrix(tmp_path, shared):
    tensors = theirs.medusa_tensors(NUM_HEADS, BLOCKS, is_papers=False)
    content = vllm_config(original_lm_head=True)
    lm_head, ids = tensors["lm_heads.0.weight"], torch.arange(theirs.VOCAB)
    for head in range(NUM_HEADS):
        del tensors[f"lm_heads.{head}.weight"]
    if shared == "file":  # under the first head's name, as vLLM allows
        tensors["lm_heads.0.weight"] = lm_head
    if shared == "target":
        lm_head = EMBEDDING
    if shared == "trimmed":
        ids = torch.tensor([4, 9, 3, 40, 31])
        lm_head = tensors["lm_head.weight"] = lm_head[ids].contiguous()
        tensors["token_map"], content["truncated_vocab_size"] = ids, len(ids)
    config, found = medusa_logits(theirs.write(tmp_path, content, tensors))
    assert config.lm_heads == (0 if shared == "target" else 1)
    for head in range(NUM_HEADS):
        wanted = theirs.medusa_logits(ROWS, blocks_of(tensors, head), lm_head)
        np.testing.assert_allclose(found[head][:, ids.numpy()], wanted, atol=1e-4)
        assert (found[head] > LOWEST).sum() == wanted.numel()
