"""Drafts change no text of an engine with an eight-bit KV cache.

A token's quantized key and value depend only on its own key and value. So their bits do
not depend on how the token was computed: alone, as a draft or with a prompt; in a new
page, in one with prefix hits, or again after preemption.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, EngineArgs
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.memory.probe import plan_for
from jaxspec.engine.model_folders import BUNDLED_DRAFT, BUNDLED_TARGET, model_folder
from jaxspec.errors import ConfigError
from jaxspec.models.families import config_from_folder
from jaxspec.models.weights import load_params
from jaxspec.sampling_params import SamplingParams
from jaxspec.sharding import make_mesh
from jaxspec.text.tokenizer import Tokenizer
from jaxspec_checkpoints import open_checkpoint
from jaxspec_kernels import native
from jaxspec_kernels.bits import ScaledPages
from tests.conformance.proposers import TREE
from tests.support import heads, pair
from tests.support.engines import (
    OneProgramRunner,
    OneShapeRunner,
    generate,
    make_engine,
    tokens_of,
)
from tests.support.oracles import PagedModel
from tests.support.rounds import constant_times

KINDS = ("int8", "fp8")
PLACE = "In the city of Paris there are many museums, and people who like to walk."
STEM = [5, 9, 33, 41, 8, 60, 17, 22, 7, 54, 12, 40, 31, 9, 28, 3]
# Some prompts share prefixes, and two of the longest sequences do not fit into the
# pages.
PROMPTS = [
    [*STEM, 6, 50],
    [*STEM, 11],
    *pair.prompts(3, longest=40),
    [*STEM[:13], 44],
    [*STEM, 6, 50],
]
SEEDS = [None, 1, None, 2, None, 3, 4]
IN_TREE: dict[str, Any] = dict(tree=TREE, num_draft_tokens=9)
ON_TWO: dict[str, Any] = dict(tensor_parallel_size=2, draft_tensor_parallel_size=1)
WAYS: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree": IN_TREE,
    "several programs": dict(runner=OneShapeRunner),
    "scanned": dict(scan_layers=True),
    "two devices": ON_TWO,
    "scanned tree on two devices": IN_TREE | ON_TWO | dict(scan_layers=True),
}
QUICK = [("int8", "chain")]


def params() -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=0.0 if seed is None else 1.0,
            seed=seed,
            max_tokens=40,
            ignore_eos=True,
        )
        for seed in SEEDS
    ]


def make(kind: str, has_draft: bool, **changes: Any) -> LLMEngine:
    settings: dict[str, Any] = pair.settings(
        kv_cache_dtype=kind, num_pages=36, max_model_len=96, runner=OneProgramRunner
    )
    if has_draft:
        return pair.own_engine(**(settings | changes))
    names = "tree", "num_draft_tokens", "draft_tensor_parallel_size"
    changes = {name: one for name, one in changes.items() if name not in names}
    return make_engine(pair.target(), **(settings | changes))


@functools.cache
def plain(kind: str, way: str) -> list[list[int]]:
    """Return texts without drafts with the same KV type, on which texts may depend."""
    engine = make(kind, has_draft=False, **WAYS[way])
    return tokens_of(generate(engine, PROMPTS, params()))


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param(kind, way, marks=() if (kind, way) in QUICK else pytest.mark.slow)
        for kind in KINDS
        for way in WAYS
    ],
)
def test_texts_with_drafts_equal_plain_decoding(kind, way):
    engine = make(kind, has_draft=True, **WAYS[way])
    with constant_times():
        said = tokens_of(generate(engine, PROMPTS, params()))
    assert said == plain(kind, way)
    stats = engine.stats
    assert stats.num_accepted_tokens > 0
    assert stats.num_preemptions > 0 and stats.num_prefix_hits > 0
    pools = jax.tree.leaves(engine.runner.state.target_pages)
    assert {pool.dtype.itemsize for pool in pools} <= {1, 4}
    assert all(pool.ndim == 3 for pool in pools if pool.dtype.itemsize == 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_the_same_without_operations_in_cpp(kind, monkeypatch):
    monkeypatch.setenv(native.VARIABLE, native.OFF)
    plainly = make(kind, has_draft=False)
    drafted = make(kind, has_draft=True)
    expected = tokens_of(generate(plainly, PROMPTS, params()))
    assert tokens_of(generate(drafted, PROMPTS, params())) == expected
    assert drafted.stats.num_accepted_tokens > 0


def test_quantized_cache_changes_texts_but_sleep_does_not():
    """With enough tokens, some text differs from that of an unquantized cache."""
    engine = make("int8", has_draft=False)
    first = tokens_of(generate(engine, PROMPTS, params()))
    assert first == plain("int8", "chain") != plain("auto", "chain")
    engine.sleep(1)
    engine.wake_up()
    assert isinstance(engine.runner.state.target_pages[0], ScaledPages)
    assert tokens_of(generate(engine, PROMPTS, params())) == first


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_heads_with_quantized_pages_change_no_text(kind):
    options: dict[str, Any] = dict(kv_cache_dtype=kind, has_one_shape=True)
    alone = make_engine(pair.target(), **pair.settings(**options))
    engine = heads.make_head_engine("eagle3", **pair.settings(**options))
    expected = tokens_of(generate(alone, PROMPTS, params()))
    assert tokens_of(generate(engine, PROMPTS, params())) == expected
    assert engine.stats.num_draft_tokens > 0
    pages = engine.runner.state.proposers[0][0]
    assert pages.dtype == (jnp.int8 if kind == "int8" else jnp.uint8)


@functools.cache
def bundled() -> tuple[Any, Any, list[int]]:
    folder = model_folder(BUNDLED_TARGET, "model")
    config, mesh = config_from_folder(folder), make_mesh(1)
    tensors = open_checkpoint(folder).tensors
    params = load_params(config, tensors, dtype=jnp.dtype(jnp.float32), mesh=mesh)
    text = "The quick brown fox jumps over the lazy dog, and runs away. " * 2
    return config, params, Tokenizer.from_folder(str(folder)).encode(text + PLACE)


@pytest.mark.parametrize(
    ("kind", "most_off", "most_nats"), [("int8", 0.06, 5e-5), ("fp8", 0.4, 1e-3)]
)
def test_quantized_cache_logits_are_close_to_unquantized(kind, most_off, most_nats):
    """Limits are two to four times the measured errors.

    For these 52 tokens, logits reach 13.8. Errors of the logits are at most 0.030 with
    int8 and 0.20 with fp8; the mean KL divergence per token is 0.000013 and 0.00031
    nats.
    """
    config, params, tokens = bundled()

    def logits(pool: Any) -> np.ndarray:
        model = PagedModel(config, params, page_size=16, num_pages=16)
        if pool is not None:
            model.kv_pages = tuple(pool(pages.shape) for pages in model.kv_pages)
        ids = np.asarray(tokens)
        return np.concatenate([model.run(ids[:60]), model.run(ids[60:])])

    def scaled(shape: tuple[int, ...]) -> ScaledPages:
        return ScaledPages(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:3]))

    def bits(shape: tuple[int, ...]) -> Any:
        return jnp.zeros(shape, jnp.uint8)

    whole, found = logits(None), logits(scaled if kind == "int8" else bits)
    off = np.abs(found - whole).max()
    assert 1e-4 < off < most_off
    ours, theirs = (np.asarray(jax.nn.log_softmax(one)) for one in (whole, found))
    assert (np.exp(ours) * (ours - theirs)).sum(axis=1).mean() < most_nats


def test_memory_plan_counts_half_the_bytes_per_page():
    def page_bytes(kind: str) -> tuple[int, int]:
        args = EngineArgs(
            model=BUNDLED_TARGET,
            speculative_model=BUNDLED_DRAFT,
            num_speculative_tokens=3,
            dtype="bfloat16",
            max_model_len=256,
            kv_cache_dtype=kind,
        )
        facts = plan_for(args).facts
        return facts.target.page_bytes, facts.draft.page_bytes

    whole = page_bytes("auto")
    assert page_bytes("fp8") == tuple(size // 2 for size in whole)
    # Every 64 values share a float32 scale of four bytes.
    assert page_bytes("int8") == tuple(size * 68 // 128 for size in whole)
    assert page_bytes("fp8_e4m3") == page_bytes("fp8")


@pytest.mark.parametrize("kind", ["int4", "fp8_e5m2", "float8", None])
def test_unknown_type_is_rejected_before_loading(kind):
    with pytest.raises(ConfigError, match="kv_cache_dtype .* 'int8', 'fp8'"):
        LLM("no/such-folder", kv_cache_dtype=kind)
