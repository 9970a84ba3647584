"""The same weights give the same logits and texts as in the two reference programs.

HuggingFace's eager float32 model and google-deepmind's own network, for scaled-down
2B, 9B and 27B, from every format that weights come in.
"""

import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxspec import LLM, SamplingParams
from jaxspec.engine import llm_engine
from jaxspec.engine.runner import Runner
from jaxspec.models.families import config_from_hf
from jaxspec.models.weights import Params, load_params
from jaxspec.sharding import make_mesh
from jaxspec_checkpoints import Checkpoint, Sizes, open_checkpoint
from jaxspec_checkpoints.gemma.flax_layout import leaf_shapes
from jaxspec_checkpoints.gemma.published import (
    GEMMA2,
    PAD_ROWS,
    published_config,
)
from tests.accuracy import gemma_library, references
from tests.support.engines import StubTokenizer
from tests.support.oracles import PagedModel, hf_logits, load_ours, model_config
from tests.support.pair import greedy_margin
from tests.support.programs import QUICK_COMPILER

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
    model = references.reference(size)
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
    return hf_logits(references.reference(size), TOKENS)


@pytest.mark.parametrize("size", references.SIZES)
@pytest.mark.parametrize("kind", references.WRITERS)
def test_logits_equal_huggingface(kind, size, tmp_path):
    model = references.reference(size)
    folder = references.write(model, size, tmp_path / "model", kind=kind)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == references.OPENED_AS[kind]
    ours = our_logits(size, load(checkpoint))
    assert np.abs(ours - expected_logits(size)).max() <= TOLERANCE


PROMPTS = [TOKENS[:30].tolist(), TOKENS[40:41].tolist(), TOKENS[45:60].tolist()]


@functools.cache
def expected_texts(size: str) -> list[list[int]]:
    """Return HuggingFace's greedy texts; assert that no token is nearly tied."""
    model = references.reference(size)
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


@functools.cache
def first_runner(size: str) -> list[Runner]:
    """Return a list that holds the first runner once it is made.

    Engines of the other formats reuse its executables, which take the parameters as
    arguments: compiling takes most of the time.
    """
    return []


def share_executables(size: str, runner: Runner) -> None:
    first = first_runner(size)
    if first:
        runner.compiler = first[0].compiler
    else:
        first.append(runner)


def make_llm(target: Path, draft: Path | None = None) -> LLM:
    # Draft in every round, because the controller's measured times are useless here.
    speculative = draft and dict(
        model=str(draft), num_speculative_tokens=NUM_DRAFT, controller="fixed"
    )
    with pytest.MonkeyPatch.context() as patch:
        # Prompts are given as token ids, so a stub is enough. The vocabulary of the
        # bundled tokenizer is larger than that of this model.
        tokenizer = StubTokenizer(references.reference("2b").config.vocab_size)
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
@pytest.mark.parametrize("size", references.SIZES)
@pytest.mark.parametrize("kind", references.WRITERS)
def test_greedy_texts_equal_huggingface(kind, size, tmp_path):
    """Greedy texts with drafts, then without drafts in the same engine."""
    target, draft = (
        references.write(
            references.reference(size, is_draft=is_draft),
            size,
            tmp_path / ("draft" if is_draft else "target"),
            kind=kind,
        )
        for is_draft in (False, True)
    )
    with make_llm(target, draft) as llm:
        share_executables(size, llm.llm_engine.runner)
        # Otherwise the first texts would not wait for programs with drafts.
        assert texts_of(llm) == expected_texts(size)
        llm.llm_engine.runner.compiler.wait_for_all()
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
    model = references.reference(size)
    config = model.config.to_dict()
    tree = gemma_library.to_tree(references.tensors_of(model), config, size)
    network = gemma_library.make_network(size, config, **changes)
    return gemma_library.logits(network, tree, TOKENS)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(size, marks=() if size == "2b" else pytest.mark.slow)
        for size in references.SIZES
    ],
)
def test_logits_equal_the_gemma_library(size):
    theirs = library_logits(size)
    ours = our_logits(size, load_ours(references.reference(size)))
    assert np.abs(ours - theirs).max() <= TOLERANCE
    assert np.abs(expected_logits(size) - theirs).max() <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("size", references.SIZES)
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
    kinds = config.attention_types[: references.CHANGES["num_hidden_layers"]]
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
@pytest.mark.parametrize("size", references.SIZES)
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
