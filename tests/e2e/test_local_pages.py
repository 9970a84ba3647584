"""Layers with a sliding window that keep only their window give the same bits.

Every engine here is compared with one whose layers keep all tokens. Freed pages are
filled with NaN, so that a read of one would break the request or the draft model.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.program.plan import StepPlan, StepShape
from jaxspec.sampling_params import SamplingParams
from tests.conformance.proposers import LOOKUP, TREE
from tests.support import pair
from tests.support.engines import OneProgramRunner, generate, make_engine

NUM_DRAFT, NUM_PROMPTS = 3, 8
# Sizes of models, proposers and pages.
CASES: dict[str, dict[str, Any]] = {
    "gemma2": dict(family=pair.GEMMA2),
    "gemma3": dict(family=pair.GEMMA3),
    "gemma3, plain": dict(family=pair.GEMMA3, has_draft=False),
    "gemma3, n-gram": dict(family=pair.GEMMA3, has_draft=False, lookup=LOOKUP),
    "gemma2, tree": dict(family=pair.GEMMA2, tree=TREE),
    "gemma3, scanned": dict(family=pair.GEMMA3, scan_layers=True),
    "gemma2, pard": dict(family=pair.GEMMA2, mask_token_id=0),
    "gemma2, bfloat16": dict(family=pair.GEMMA2, dtype="bfloat16"),
    "gemma2, window of 32": dict(family=pair.GEMMA2, window=32, page_size=16),
    "gemma2, window of 13": dict(family=pair.GEMMA2, window=13, page_size=8),
}


@functools.partial(jax.jit, static_argnames="unit")
def fill(pages: jax.Array, is_freed: jax.Array, unit: int) -> jax.Array:
    """Return an array of pages with NaN in the freed units of `unit` pages."""
    num_units = len(is_freed)
    num_parts = pages.shape[0] // num_units  # layers and turns
    nan = jnp.float32(jnp.nan)
    if pages.dtype == jnp.uint16:
        nan = jax.lax.bitcast_convert_type(nan.astype(jnp.bfloat16), jnp.uint16)
    parts = pages.reshape(max(num_parts // unit, 1), num_units, -1)
    return jnp.where(is_freed[None, :, None], nan, parts).reshape(pages.shape)


class PoisonedRunner(OneProgramRunner):
    """Fills local pages with NaN once they are freed."""

    freed: list[int]
    num_freed = 0

    def launch(self, plan: StepPlan, shape: StepShape) -> Any:
        freed, self.freed = self.freed, []
        if freed:
            self._poison(freed)
            self.num_freed += len(freed)
        return super().launch(plan, shape)

    def _poison(self, freed: list[int]) -> None:
        unit = self.pool.unit_pages
        assert unit is not None
        # A mask, so that one program serves any number of freed pages.
        is_freed = np.zeros(self.pool.num_units, bool)
        is_freed[np.array(freed) // unit] = True

        def poisoned(pages: jax.Array) -> jax.Array:
            return fill(pages, is_freed, unit) if pages.ndim == 4 else pages

        state = self.state
        self.state = type(state)(
            rows=state.rows,
            token_pages=state.token_pages,
            target_pages=jax.tree.map(poisoned, state.target_pages),
            proposers=jax.tree.map(poisoned, state.proposers),
        )


@functools.cache
def model(family: str, window: int, seed: int) -> Any:
    made = pair.make_model(2, family=family, sliding_window=window)
    return pair.add_noise(made) if seed else made


def make(
    *,
    family: str,
    is_off: bool,
    window: int = 8,
    has_draft: bool = True,
    **settings: Any,
) -> LLMEngine:
    is_plain = not has_draft and "lookup" not in settings
    num_draft_tokens = 0 if is_plain else 9 if "tree" in settings else NUM_DRAFT
    engine = make_engine(
        model(family, window, 0),
        model(family, window, 1) if has_draft else None,
        num_draft_tokens=num_draft_tokens,
        runner=OneProgramRunner if is_off else PoisonedRunner,
        disable_hybrid_kv_cache_manager=is_off,
        **(pair.settings(num_pages=80, max_num_seqs=3) | settings),
    )
    if not is_off:
        runner, tables = engine.runner, engine.scheduler.tables
        assert isinstance(runner, PoisonedRunner)
        runner.freed = []
        free = tables.free_behind

        def free_behind(request: Any, first_local: int) -> None:
            pages = request.local_pages[: first_local - request.first_local]
            free(request, first_local)
            # Texts of one request still find its pages.
            runner.freed += filter(tables.pool.is_blank, pages)

        tables.free_behind = free_behind
    return engine


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Return greedy and seeded requests with several K; one seeded one has n=3."""
    prompts = pair.prompts(NUM_PROMPTS, longest=70)
    params = []
    for number in range(len(prompts)):
        params.append(
            SamplingParams(
                temperature=0.0 if number % 2 else 1.0,
                seed=number,
                n=3 if number == NUM_PROMPTS - 2 else 1,
                max_tokens=36,
                ignore_eos=True,
                logprobs=2,
                extra_args={"num_speculative_tokens": (3, 1, 0, 2)[number % 4]},
            )
        )
    return prompts, params


def results_of(engine: LLMEngine) -> Any:
    prompts, params = requests()
    if not engine.config.max_draft_tokens:
        params = [one.clone() for one in params]
        for one in params:
            one.extra_args = None
    outputs = generate(engine, prompts, params)
    assert engine.scheduler.policy.stop_reason is None
    logprobs = [
        sorted((token, one.logprob) for token, one in row.items())
        for output in outputs
        for text in output.outputs
        for row in text.logprobs or []
    ]
    texts = [list(text.token_ids) for output in outputs for text in output.outputs]
    return texts, logprobs, engine.stats.acceptance_rate


# Each case compiles two engines. A quick test in test_lossless.py compares the texts of
# a Gemma 3 with local pages.
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_freed_pages_change_no_bits(name):
    case: dict[str, Any] = CASES[name] | dict(enable_prefix_caching=False)
    expected = results_of(make(is_off=True, **case))
    engine = make(is_off=False, **case)
    assert engine.config.local_window is not None
    assert results_of(engine) == expected
    assert isinstance(engine.runner, PoisonedRunner) and engine.runner.num_freed
