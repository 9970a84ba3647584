"""One target, several draft models of its sizes, and engines that share executables.

Compilation takes most of the tests' time. All models here have the same sizes, so that
one executable, which takes the parameters as arguments, serves all of them.
"""

import contextlib
import functools
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.runner import Runner
from jaxspec.program.plan import Features, StepPlan, StepShape
from jaxspec.program.wire import DraftPrefillResult, StepResult
from jaxspec.sharding import DRAFT_MESH_AXES
from jaxspec_checkpoints.quantization import Scheme
from tests.support.engines import load_weights, make_engine, with_settings
from tests.support.oracles import hf_logits, make_gemma3, make_hf_model

# All sizes are different, so that a shape identifies an array.
SIZES = dict(
    vocab_size=64,
    hidden_size=20,
    intermediate_size=28,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    query_pre_attn_scalar=8,
    sliding_window=8,
    final_logit_softcapping=8.0,
)
# Sizes of the Gemma 3 that differ; `oracles.make_gemma3` sets its rotary embeddings.
SIZES_GEMMA3: dict[str, Any] = SIZES | dict(
    num_hidden_layers=8,
    query_pre_attn_scalar=5,
    sliding_window_pattern=6,
    final_logit_softcapping=None,
)
GEMMA2, GEMMA3 = "gemma2", "gemma3"
NUM_DRAFT = 3
# Tokens of a trimmed draft, half of 64: runs and single tokens, neither the first nor
# the last.
KEPT = sorted({1, *range(5, 12), *range(20, 30), *range(31, 60, 3), 50, 53, 61, 62})
# Quantization schemes of draft models, with groups that divide the input features.
INT8 = Scheme(kind="int8", has_embedding=True)
INT4 = Scheme(kind="int4", group_size=4, has_embedding=True)
# Two rows and one prompt tile per launch give few shapes. Two of the longest requests
# do not fit into the pages. Programs of one row are tested in test_general_programs.py
# and tests/test_architecture.py.
SETTINGS: dict[str, Any] = dict(
    max_num_seqs=2,
    page_size=4,
    num_pages=60,
    max_model_len=112,
    max_num_batched_tokens=32,
)
EOS = 1

# If the best logit leads by more than this, rounding cannot change a greedy token.
MIN_MARGIN = 1e-4


def settings(**changes: Any) -> dict[str, Any]:
    """Return `SETTINGS` with changes."""
    return SETTINGS | changes


def make_model(seed: int, *, family: str = GEMMA2, **changes: Any) -> Any:
    """Make a model whose text is not repetitive.

    With tied embeddings a random model repeats its last token. Such a text would be
    right even with keys and values at wrong positions. Random signs in the final norm
    and layers with larger outputs prevent repetition.
    """
    if family == GEMMA3:
        model = make_gemma3(seed=seed, **(SIZES_GEMMA3 | changes))
    else:
        assert family == GEMMA2
        model = make_hf_model(seed=seed, **(SIZES | changes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight.add_(3)
            layer.post_feedforward_layernorm.weight.add_(3)
        weight = model.model.norm.weight
        signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
        # Gemma's norms scale by 1 + weight.
        weight.copy_(3 * signs * (1 + weight) - 1)
    return model


@functools.cache
def target(family: str = GEMMA2) -> Any:
    return make_model(2, family=family)


@functools.cache
def draft(kind: str, family: str = GEMMA2) -> Any:
    """Return a draft model that is right often, by chance or always, by `kind`."""
    if kind == "same":
        return target(family)
    if kind == "unrelated":
        return make_model(1, family=family)
    assert kind == "noisy"
    return add_noise(make_model(2, family=family))


def add_noise(model: Any) -> Any:
    """Add noise to a target; return it as a draft model that is often right."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for value in model.parameters():
            noise = torch.randn(value.shape, generator=generator)
            value.add_(0.03 * noise * value.std())
    return model


@functools.cache
def _plain_engine() -> LLMEngine:
    return make_engine(target(), has_one_shape=True, **SETTINGS)


def plain_engine() -> LLMEngine:
    """Return an engine without a draft model, with an empty prefix cache.

    Engines that `with_settings` derives from it share its pages, and may overwrite
    pages that it has cached.
    """
    engine = _plain_engine()
    engine.reset_prefix_cache()
    return engine


def own_engine(**changes: Any) -> LLMEngine:
    """Return a speculative engine with arrays of its own, so that it may sleep.

    Args:
        changes: Arguments of `make_engine` that differ.
    """
    options: dict[str, Any] = dict(num_draft_tokens=NUM_DRAFT, has_one_shape=True)
    return make_engine(target(), draft("noisy"), **(options | SETTINGS | changes))


@functools.cache
def _first_engine() -> LLMEngine:
    first = own_engine()
    _keep_arrays(first.runner)
    return first


@functools.cache
def _runner(kind: str) -> Runner:
    first = _first_engine().runner
    if kind == "noisy":
        return first
    params = load_weights(draft(kind), first.dtype, first.mesh, DRAFT_MESH_AXES)
    runner = type(first)(first.config, first.mesh, first.params[0], params)
    runner.compiler_options, runner.cache = first.compiler_options, first.cache
    runner.compiler, runner.compiles_in_background = (
        first.compiler,
        first.compiles_in_background,
    )
    _keep_arrays(runner)
    return runner


def _keep_arrays(runner: Runner) -> None:
    """Make calls fail that would drop weights or programs shared with other tests."""

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("other tests share these arrays: use pair.own_engine()")

    for name in ("drop_weights", "leave_out_drafts"):
        setattr(runner, name, refused)


def engine(kind: str = "noisy", *, seed: int = 0, **speculative: Any) -> LLMEngine:
    """Return a new speculative engine over shared weights and executables."""
    made = with_settings(_first_engine(), seed=seed, **speculative)
    return LLMEngine(made.config, runner=_runner(kind), tokenizer=made.tokenizer)


class GeneralRunner(Runner):
    """Runs every launch in the largest program, with all features but grammars."""

    def largest(self, shape: StepShape) -> StepShape:
        if shape.is_draft_prefill:
            return shape
        count = self.config.num_logprobs
        return StepShape(
            num_seqs=self.config.max_num_seqs,
            num_levels=shape.num_levels,
            max_prompt_tokens=self.config.max_num_batched_tokens,
            features=Features(
                has_controls=True, num_logprobs=count, num_prompt_logprobs=count
            ),
        )

    def launch(self, plan: StepPlan, shape: StepShape) -> Any:
        return super().launch(plan, self.largest(shape))

    def fetch(self, result: Any, shape: StepShape) -> StepResult | DraftPrefillResult:
        return super().fetch(result, self.largest(shape))


def prompts(count: int, *, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Return prompts of 1 to `longest` tokens, evenly spread, without end tokens."""
    random = np.random.default_rng(seed)
    lengths = np.linspace(1, longest, count).astype(int)
    random.shuffle(lengths)
    return [random.integers(3, 64, length).tolist() for length in lengths]


@contextlib.contextmanager
def recorded(made: LLMEngine) -> Iterator[list[tuple[StepPlan, StepShape, Any]]]:
    """Record plan, shape and result of each launch that is read in this context."""
    runner, plans, rounds = made.runner, deque(), []
    launch, fetch = runner.launch, runner.fetch

    def note_launch(plan: StepPlan, shape: StepShape) -> Any:
        plans.append((plan, shape))
        return launch(plan, shape)

    def note_fetch(result: Any, shape: StepShape) -> StepResult | DraftPrefillResult:
        rounds.append((*plans.popleft(), fetch(result, shape)))
        return rounds[-1][-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "launch", note_launch)
        patch.setattr(runner, "fetch", note_fetch)
        yield rounds


def greedy_margin(prompt: list[int], tokens: list[int], *, model: Any = None) -> float:
    """Return the smallest lead of a text's tokens in HuggingFace's logits.

    It is negative if the text is not HuggingFace's greedy text.

    One forward pass suffices: if every token is the argmax given those before it, the
    text is the greedy text, by induction.
    """
    model = target() if model is None else model
    logits = hf_logits(model, np.array(prompt + tokens))[len(prompt) - 1 : -1]
    rows = np.arange(len(tokens))
    said = logits[rows, tokens]
    logits[rows, tokens] = -np.inf
    return float((said - logits.max(axis=1)).min())
