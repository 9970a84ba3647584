"""Trained models are written in an engine's format and give the same outputs there."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.model import MASK_TOKEN
from jaxspec.models.families import config_from_folder
from jaxspec.models.heads.weights import functions_of_head, load_head
from jaxspec.models.matrices import DenseMatrix
from jaxspec.models.trimmed import TOKEN_IDS
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.train.__main__ import make_parser
from jaxspec.train.methods import DraftMethod
from jaxspec.train.run import make_method
from jaxspec.train.target import Target, kept_rows
from jaxspec_checkpoints import bundled_target, open_checkpoint
from jaxspec_checkpoints.checkpoint import TOKEN_MAP
from jaxspec_checkpoints.trimming import read_token_map
from tests.checkpoints.gguf_files import write_gguf
from tests.support.oracles import (
    TINY,
    hf_logits,
    hf_tensors,
    make_hf_model,
    model_config,
)
from tests.train import tiny

TEXT = tiny.make_text(1)


def run_passes(target: Target, method: Any, params: Any) -> list[jax.Array]:
    """Return the logits of every pass over a text."""
    tokens = jnp.asarray(TEXT.tokens)
    states = target.reader(method.layers)(tokens)

    @jax.jit
    def run(params, embedding, tokens, states):
        found = method.hidden(params, embedding, tokens, states)
        return [
            method.logits(params, embedding, number, hidden)
            for number, hidden in enumerate(found)
        ]

    return run(params, target.embedding, tokens, states)


@pytest.mark.parametrize(
    ("kind", "export"),
    [
        pytest.param("eagle", "safetensors", marks=pytest.mark.slow),
        ("eagle3", "safetensors"),
        ("eagle3", "specforge"),
        ("medusa", "safetensors"),
        ("dflash", "safetensors"),
    ],
)
def test_saved_head_equals_the_trained_one(tmp_path, kind, export):
    method, target = getattr(tiny, f"{kind}_method")(), tiny.make_target()
    params = method.init(target, 3, tiny.IDS if method.config.is_trimmed else None)

    def moved(leaf: jax.Array) -> jax.Array:
        """Make a parameter nonzero, and round it to the type in which it is written."""
        if leaf.dtype == jnp.int32:
            return leaf
        return (leaf + 0.1).astype(jnp.bfloat16).astype(jnp.float32)

    params = jax.tree.map(moved, params)
    method.save(tmp_path / "head", params, target, export=export)
    options: Any = dict(dtype=jnp.dtype(jnp.float32), mesh=target.mesh)
    config, loaded = load_head(tmp_path / "head", target.config, **options)
    assert config == method.config
    found = [run_passes(target, method, one) for one in (params, loaded)]
    for one, other in zip(*found, strict=True):
        # EAGLE has no norm before its logits, so they are in the thousands.
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    content = json.loads((tmp_path / "head" / "config.json").read_text())
    if export == "specforge":
        # These layers count from 0, ours from the embedding.
        layers = content["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        assert layers == [0, 1, 3]
        assert content["architectures"] == ["LlamaForCausalLMEagle3"]
    elif kind == "eagle3":
        verifier = content["speculators_config"]["verifier"]
        assert verifier["name_or_path"] == "tiny"
    assert functions_of_head(config).param_specs(config)


def test_eagle3_head_starts_with_the_targets_logits():
    method, target = tiny.eagle3_method(), tiny.make_target()
    ids = np.arange(1, 1 + tiny.DRAFT_VOCAB)
    params = method.init(target, 0, ids)
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(3, tiny.HIDDEN)))
    rows = rows.astype(jnp.float32)
    found = method.logits(params, target.embedding, 0, rows)
    normed = rows * jax.lax.rsqrt(jnp.mean(rows**2, -1, keepdims=True) + 1e-5)
    normed *= 1 + target.params["final_norm"][None]
    wanted = normed @ np.asarray(target.embedding.values)[ids].T  # pyright: ignore[reportAttributeAccessIssue]
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def draft_target(folder: Path) -> Target:
    """Return the tiny target, in a folder with a tokenizer."""
    folder.mkdir()
    shutil.copy(bundled_target() / "tokenizer.model", folder)
    (folder / "config.json").write_text("{}")
    return dataclasses.replace(tiny.make_target(), folder=folder)


def draft_of(reference: Any, *, mask: int | None = None, **changes: Any) -> DraftMethod:
    """Return the training of a draft model that starts as a HuggingFace model."""
    content = TINY | changes | dict(model_type="gemma2")
    content["architectures"] = ["Gemma2ForCausalLM"]
    if mask is not None:
        content[MASK_TOKEN] = mask
    config: Any = model_config(reference, mask_token_id=mask)
    start = hf_tensors(reference)
    num_passes = 1 if mask is None else 3
    return DraftMethod(
        config=config, hf_config=content, start=start, num_passes=num_passes
    )


@pytest.mark.parametrize("is_tied", [True, False])
def test_saved_draft_equals_huggingface(tmp_path, is_tied):
    changes: dict[str, Any] = dict(num_hidden_layers=2, tie_word_embeddings=is_tied)
    reference = make_hf_model(seed=4, **changes)
    method, target = draft_of(reference, **changes), draft_target(tmp_path / "target")
    params = method.init(target, 0, None)
    assert type(params["embedding"]) is DenseMatrix
    (found,) = run_passes(target, method, params)
    np.testing.assert_allclose(found, hf_logits(reference, TEXT.tokens[0]), atol=1e-4)
    made = tmp_path / "made"
    method.save(made, params, target)
    assert config_from_folder(made).num_layers == 2
    stored = open_checkpoint(made).tensors
    for name, tensor in hf_tensors(reference).items():
        wanted = tensor.whole().astype(jnp.bfloat16)
        np.testing.assert_array_equal(stored[name].whole(), wanted)
    assert (made / "tokenizer.model").is_file()
    if is_tied:
        # The draft of a GGUF target has the tokenizer of this file.
        path = tmp_path / "m.gguf"
        write_gguf(path)
        method.save(tmp_path / "own", params, dataclasses.replace(target, folder=path))
        found = Tokenizer.from_folder(tmp_path / "own")
        assert found.digest == Tokenizer.from_folder(path).digest
        assert not (tmp_path / "own" / "model.gguf").exists()


@pytest.mark.parametrize("export", ["safetensors", "gguf"])
def test_draft_of_the_targets_layers_shares_its_embedding(tmp_path, export):
    """A draft starts as two of the target's layers, and proposes some tokens only."""
    folder = tmp_path / "target"
    folder.mkdir()
    shutil.copy(bundled_target() / "tokenizer.model", folder)
    # The attention scale is the one that llama.cpp derives.
    changes: dict[str, Any] = dict(vocab_size=8192, query_pre_attn_scalar=8)
    reference = make_hf_model(**changes)
    reference.save_pretrained(folder)
    options = make_parser().parse_args(
        ["draft", "--target", "t", "--data", "d", "--out", "o"]
        + ["--keep-layers", "0,3", "--draft-vocab-size", "40", "--export", export]
    )
    config = model_config(reference)
    method = make_method(options, config, folder)
    assert isinstance(method, DraftMethod)
    target = tiny.target_of(reference, tiny.make_target().mesh, folder)
    # A map is most frequent first; the rows of a head are in order of their ids.
    ranked = np.array([1, 2, 0, *range(90, 53, -1)])
    params = method.init(target, 0, ranked)
    ids = params.pop(TOKEN_IDS)
    np.testing.assert_array_equal(ids, np.sort(ranked))
    assert params.keys() == {"layers", "final_norm"}, "only these are trained"
    tokens = jnp.asarray(TEXT.tokens)
    states = target.reader(())(tokens)
    (hidden,) = method.hidden(params, target.embedding, tokens, states)
    head = kept_rows(target.embedding, ids)
    found = method.logits(params, head, 0, hidden)
    small = make_hf_model(num_hidden_layers=2, **changes)
    for ours, theirs in (
        *(("embed_tokens", "embed_tokens"), ("norm", "norm")),
        *(("layers.0", "layers.0"), ("layers.1", "layers.3")),
    ):
        weights = reference.model.get_submodule(theirs).state_dict()
        small.model.get_submodule(ours).load_state_dict(weights)
    wanted = hf_logits(small, TEXT.tokens[0])[:, ids]
    np.testing.assert_allclose(found, wanted, atol=1e-4)

    made = tmp_path / "made"
    params[TOKEN_IDS] = ids
    method.save(made, params, target, token_ids=ranked, export=export)
    assert (made / "made.gguf").is_file() == (export == "gguf")
    assert read_token_map(made / TOKEN_MAP, 8192) == ranked.tolist()
    stored = open_checkpoint(made).tensors
    for name, tensor in hf_tensors(small).items():
        wanted = np.asarray(tensor.whole(), np.float32)
        values = stored[name].whole().astype(np.float32)
        np.testing.assert_allclose(values, wanted, rtol=2**-7, atol=1e-6)
    assert config_from_folder(made).num_layers == 2
    text = "Two dogs"
    tokenizers = [Tokenizer.from_folder(one) for one in (made, folder)]
    assert tokenizers[0].encode(text) == tokenizers[1].encode(text)


def test_parallel_draft_is_trained_on_an_engines_inputs(tmp_path):
    """Training computes the drafts that masks after every token would give.

    The oracle runs HuggingFace on each prefix of the text, followed by masks.
    """
    changes = dict(num_hidden_layers=2, sliding_window=4)
    reference = make_hf_model(seed=4, **changes)
    method = draft_of(reference, mask=3, **changes)
    target = draft_target(tmp_path / "target")
    params = method.init(target, 0, None)
    found = run_passes(target, method, params)
    for place in (0, 4, tiny.LENGTH - 1):
        known = np.append(TEXT.tokens[0, : place + 1], [3, 3])
        wanted = hf_logits(reference, known)[place:]
        ours = np.stack([np.asarray(one)[place] for one in found])
        np.testing.assert_allclose(ours, wanted, atol=1e-4)
    method.save(tmp_path / "made", params, target)
    config = config_from_folder(tmp_path / "made")
    assert (config.mask_token_id, config.num_layers) == (3, 2)


def test_new_draft_keeps_the_embeddings_inner_products(tmp_path):
    reference = make_hf_model(hidden_size=24, num_hidden_layers=2)
    method = DraftMethod(config=model_config(reference), hf_config={})  # pyright: ignore[reportArgumentType]
    target = draft_target(tmp_path / "target")
    params = method.init(target, 0, None)
    ours = np.asarray(params["embedding"].values)
    theirs = np.asarray(target.embedding.values)  # pyright: ignore[reportAttributeAccessIssue]
    assert ours.shape == (tiny.VOCAB, 24)
    alike = np.corrcoef((ours @ ours.T).ravel(), (theirs @ theirs.T).ravel())[0, 1]
    assert alike > 0.8
    np.testing.assert_allclose(ours.std(), 0.02, rtol=1e-3)
