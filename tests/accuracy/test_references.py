"""The same weights give the same logits and texts as in the two reference programs.

HuggingFace's eager float32 model and google-deepmind's own network, for scaled-down
2B, 9B and 27B, from every format that weights come in.
"""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch

from jaxspec import LLM, SamplingParams
from jaxspec.engine import llm_engine
from jaxspec.engine.runner import Runner
from jaxspec.models.families import config_from_hf
from jaxspec.models.weights import Params, load_params
from jaxspec.sharding import make_mesh
from jaxspec_checkpoints import (
    Checkpoint,
    Sizes,
    bundled_target,
    open_checkpoint,
)
from jaxspec_checkpoints.gemma.flax_layout import leaf_shapes
from jaxspec_checkpoints.gemma.published import (
    GEMMA2,
    PAD_ROWS,
    published_config,
)
from jaxspec_checkpoints.writing import write_checkpoint
from tests.accuracy import gemma_library
from tests.checkpoints.models import FAMILIES
from tests.support.engines import StubTokenizer
from tests.support.oracles import (
    PagedModel,
    hf_logits,
    load_ours,
    make_hf_model,
    model_config,
)
from tests.support.pair import greedy_margin
from tests.support.programs import QUICK_COMPILER

SIZES = tuple(FAMILIES)
# Three layers (local, global, local), with caps and a window so small that they affect
# every test.
CHANGES: dict[str, Any] = dict(
    vocab_size=160,
    num_hidden_layers=3,
    attn_logit_softcapping=5.0,
    final_logit_softcapping=3.0,
    sliding_window=8,
)
# hidden_size / num_attention_heads must be an integer, as in the published 27B: the
# gemma library rounds it down.
SIZE_CHANGES: dict[str, dict[str, int]] = {
    "2b": {},
    "9b": {},
    "27b": dict(hidden_size=160, intermediate_size=1280),
}


@functools.cache
def reference(size: str, *, is_draft: bool = False) -> Any:
    """Return a random model whose text does not repeat itself.

    With tied embeddings a random model repeats its last token, even with keys at wrong
    positions. Layers with large outputs and random signs in the final norm prevent
    that. The draft is the same model with noise: it agrees often.
    """
    shape = FAMILIES[size] | CHANGES | SIZE_CHANGES[size]
    model = make_hf_model(seed=6, **shape)
    # HuggingFace's texts have a fixed length; our engine uses `ignore_eos`.
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight.add_(2)
            layer.post_feedforward_layernorm.weight.add_(2)
        weight = model.model.norm.weight
        signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
        # Gemma's norms scale by 1 + weight.
        weight.copy_(2 * signs * (1 + weight) - 1)
        if is_draft:
            for value in model.parameters():
                noise = torch.randn(value.shape, generator=generator)
                value.add_(0.03 * noise * value.std())
    return model


def tensors_of(model: Any) -> dict[str, np.ndarray]:
    """Return the weights by canonical name, as host arrays."""
    return {name: value.detach().numpy() for name, value in model.named_parameters()}


def _write_shards(model: Any, size: str, folder: Path) -> None:
    model.save_pretrained(folder, max_shard_size=200_000)
    assert len(list(folder.glob("model-*.safetensors"))) > 2


def _convert(to: str, model: Any, size: str, folder: Path) -> None:
    source = folder.with_name(f"{folder.name}-source")
    model.save_pretrained(source)
    write_checkpoint(open_checkpoint(source), folder, to=to, progress=False)


def _write_nested(model: Any, size: str, folder: Path) -> None:
    """Save the gemma library's own parameters with Orbax, without our writer."""
    config = model.config.to_dict()
    tree = gemma_library.to_tree(tensors_of(model), config, size)
    table = tree["embedder"]["input_embedding"]
    # Rows past the vocabulary must not matter, so they are nonzero.
    pads = np.full((PAD_ROWS, table.shape[1]), 7, table.dtype)
    tree["embedder"]["input_embedding"] = np.concatenate([table, pads])
    model.config.save_pretrained(folder)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / f"gemma2-{size}", tree)


WRITERS: dict[str, Callable[[Any, str, Path], None]] = {
    "hf": lambda model, size, folder: model.save_pretrained(folder),
    "hf_shards": _write_shards,
    "kaggle_flat": functools.partial(_convert, "kaggle"),
    "kaggle_nested": _write_nested,
    "orbax": functools.partial(_convert, "orbax"),
}


def write(model: Any, size: str, folder: Path, *, kind: str) -> Path:
    """Write a model and a tokenizer with one of `WRITERS`; return `folder`."""
    WRITERS[kind](model, size, folder)
    shutil.copyfile(bundled_target() / "tokenizer.model", folder / "tokenizer.model")
    return folder


TOLERANCE = 1e-4
# The window is 8: most queries of a local layer do not see the first tokens.
TOKENS = np.random.default_rng(1).integers(3, 160, 60)
LENGTH = 64
NUM_DRAFT = 3


@functools.cache
def our_model(size: str) -> PagedModel:
    """Return the model of a published size, compiled once.

    `our_logits` changes its parameters.
    """
    model = reference(size)
    return PagedModel(model_config(model), load_ours(model))


def our_logits(size: str, params: Params) -> np.ndarray:
    ours = our_model(size)
    ours.params, ours.length = params, 0
    ours.kv_pages = tuple(jnp.full_like(layer, jnp.nan) for layer in ours.kv_pages)
    return ours.run(TOKENS)


def load(checkpoint: Checkpoint) -> Params:
    config = config_from_hf(checkpoint.config, checkpoint.generation_config)
    return load_params(
        config, checkpoint.tensors, dtype=jnp.dtype(jnp.float32), mesh=make_mesh(1)
    )


@functools.cache
def expected_logits(size: str) -> np.ndarray:
    return hf_logits(reference(size), TOKENS)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", WRITERS)
def test_logits_equal_huggingface(kind, size, tmp_path):
    model = reference(size)
    folder = write(model, size, tmp_path / "model", kind=kind)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == kind.partition("_")[0]
    ours = our_logits(size, load(checkpoint))
    assert np.abs(ours - expected_logits(size)).max() <= TOLERANCE


PROMPTS = [TOKENS[:30].tolist(), TOKENS[40:41].tolist(), TOKENS[45:60].tolist()]


@functools.cache
def expected_texts(size: str) -> list[list[int]]:
    """Return HuggingFace's greedy texts; assert that no token is nearly tied."""
    model = reference(size)
    texts = []
    for prompt in PROMPTS:
        whole = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=LENGTH,
            do_sample=False,
        )
        texts.append(whole[0, len(prompt) :].tolist())
        margin = greedy_margin(prompt, texts[-1], model=model)
        assert margin > TOLERANCE, "a near tie: choose another seed"
    assert all(len(text) == LENGTH for text in texts)
    # A text that repeats one token could be right even with keys and values at wrong
    # positions.
    assert sum(len(set(text)) for text in texts) > 12 * len(texts)
    return texts


# The first runner of each size. Engines of the other formats reuse its executables, which
# take the parameters as arguments: compiling takes most of the time.
FIRST_RUNNERS: dict[str, Runner] = {}


def make_llm(target: Path, draft: Path | None = None) -> LLM:
    # Draft in every round, because the controller's measured times are useless here.
    speculative = draft and dict(
        model=str(draft), num_speculative_tokens=NUM_DRAFT, controller="fixed"
    )
    with pytest.MonkeyPatch.context() as patch:
        # Prompts are given as token ids, so a stub is enough. The vocabulary of the
        # bundled tokenizer is larger than that of this model.
        tokenizer = StubTokenizer(reference("2b").config.vocab_size)
        patch.setattr(llm_engine, "read_tokenizer", lambda config: tokenizer)
        llm = LLM(
            str(target),
            dtype="float32",
            max_model_len=128,
            max_num_seqs=1,
            max_num_batched_tokens=32,
            block_size=4,
            num_gpu_blocks_override=64,
            speculative_config=speculative,
        )
    llm.llm_engine.runner.compiler_options = QUICK_COMPILER
    return llm


def texts_of(llm: LLM, **changes: Any) -> list[list[int]]:
    params = SamplingParams(
        temperature=0, max_tokens=LENGTH, ignore_eos=True, **changes
    )
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", WRITERS)
def test_greedy_texts_equal_huggingface(kind, size, tmp_path):
    """Greedy texts with drafts, then without drafts in the same engine."""
    target, draft = (
        write(
            reference(size, is_draft=is_draft),
            size,
            tmp_path / ("draft" if is_draft else "target"),
            kind=kind,
        )
        for is_draft in (False, True)
    )
    with make_llm(target, draft) as llm:
        runner = llm.llm_engine.runner
        runner.compiler = FIRST_RUNNERS.setdefault(size, runner).compiler
        # Otherwise the first texts would not wait for programs with drafts.
        assert texts_of(llm) == expected_texts(size)
        runner.compiler.wait_for_all()
        stats = llm.llm_engine.stats
        num_before = stats.num_draft_tokens
        assert texts_of(llm) == expected_texts(size)
        assert 0.3 < stats.acceptance_rate < 0.95
        num_drafted = stats.num_draft_tokens
        texts = texts_of(llm, extra_args={"num_speculative_tokens": 0})
        assert texts == expected_texts(size)
        assert stats.num_draft_tokens == num_drafted > num_before + 100


def library_logits(size: str, **changes: Any) -> np.ndarray:
    """Return the logits of the gemma library, with changes of its own config."""
    model = reference(size)
    config = model.config.to_dict()
    tree = gemma_library.to_tree(tensors_of(model), config, size)
    network = gemma_library.make_network(size, config, **changes)
    return gemma_library.logits(network, tree, TOKENS)


@pytest.mark.parametrize(
    "size", ["2b", *(pytest.param(one, marks=pytest.mark.slow) for one in SIZES[1:])]
)
def test_logits_equal_the_gemma_library(size):
    theirs = library_logits(size)
    ours = our_logits(size, load_ours(reference(size)))
    assert np.abs(ours - theirs).max() <= TOLERANCE
    assert np.abs(expected_logits(size) - theirs).max() <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_every_feature_has_an_effect_in_the_gemma_library(size):
    """Without this, the comparison above would prove nothing about a feature."""
    config = gemma_library.published_networks()[size].config
    # The other scale of queries: in the scaled-down 2B 8 becomes 9.
    ways = type(config.query_pre_attn_norm)
    other = {
        "2b": ways.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS,
        "9b": ways.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS,
        "27b": ways.BY_ONE_OVER_SQRT_HEAD_DIM,
    }
    kinds = config.attention_types[: CHANGES["num_hidden_layers"]]
    changes: list[dict[str, Any]] = [
        dict(attn_logits_soft_cap=None),
        dict(final_logit_softcap=None),
        dict(sliding_window_size=9),
        dict(query_pre_attn_norm=other[size]),
        dict(attention_types=kinds[1:] + kinds[:1]),
    ]
    base = library_logits(size)
    for change in changes:
        difference = np.abs(library_logits(size, **change) - base).max()
        assert difference > 100 * TOLERANCE, change


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_published_sizes_match_the_gemma_library(size):
    """Compare the names and shapes of all parameters, and sizes without a shape."""
    network = gemma_library.published_networks()[size]
    config = published_config(size)
    model = config_from_hf(config)
    theirs = network.config
    assert theirs.query_pre_attn_scalar() == model.query_pre_attn_scalar**-0.5
    assert theirs.attn_logits_soft_cap == model.attn_logit_softcapping
    assert theirs.final_logit_softcap == model.final_logit_softcapping
    assert theirs.sliding_window_size == model.sliding_window
    assert theirs.local_base_frequency == model.rope_theta
    assert theirs.global_base_frequency == model.rope_theta
    windows = [model.window(layer) is not None for layer in range(model.num_layers)]
    local = [kind.name == "LOCAL_SLIDING" for kind in theirs.attention_types]
    assert local == windows

    sizes = Sizes.from_config(config)
    expected = leaf_shapes(
        sizes,
        num_rows=sizes.vocab_size + PAD_ROWS,
        is_model_first=GEMMA2.is_model_first(sizes),
    )
    assert gemma_library.shapes(network(config=theirs, dtype=jnp.bfloat16)) == expected
