"""Make engines with random HuggingFace models, small enough to compile in seconds."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
import torch
from jax.sharding import Mesh

import jaxspec.llm
from jaxspec.config.engine import EngineConfig, SpeculativeConfig
from jaxspec.config.methods import SUFFIX_DEFAULTS
from jaxspec.config.speculation import FIXED
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.program_cache import ProgramCache
from jaxspec.engine.runner import Runner, build_mesh
from jaxspec.llm import LLM
from jaxspec.models import cpu
from jaxspec.models.heads.config import HeadConfig
from jaxspec.models.weights import load_params
from jaxspec.outputs import RequestOutput
from jaxspec.program.plan import StepPlan, StepShape
from jaxspec.program.wire import DraftPrefillResult, StepResult
from jaxspec.sampling_params import SamplingParams
from jaxspec.sharding import DRAFT_MESH_AXES, TARGET_MESH_AXES
from jaxspec_checkpoints.quantization import Scheme
from tests.support.defaults import DEFAULTS
from tests.support.oracles import hf_tensors, make_hf_model, model_config
from tests.support.programs import QUICK_COMPILER, USERS_COMPILER
from tests.support.sizes import MICRO
from tests.support.stub_tokenizer import StubTokenizer

# Factor of the outputs of a draft model's layers after the first, relative to the
# target's.
DIMMED = 0.1

# Program cache that all tests use, in this run and in later ones.
PROGRAMS = Path(__file__).parents[2] / ".pytest_cache" / "programs"

SETTINGS: dict[str, Any] = dict(
    dtype="float32",
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=128,
    page_size=4,
    num_pages=256,
    seed=0,
    tensor_parallel_size=1,
)


class OneShapeRunner(Runner):
    """Pads every plan to one shape, so that a test compiles one or two programs.

    A program of any shape pads the entries that a plan lacks. Rounds of plain decoding
    have a program of their own.
    """

    def launch(self, plan: StepPlan, shape: StepShape) -> Any:
        config = self.config
        if shape.is_draft_prefill:
            padded = StepShape.draft_prefill(config.max_num_batched_tokens)
            return super().launch(plan, padded), padded
        padded = StepShape(
            num_seqs=config.max_num_seqs,
            num_levels=(shape.num_levels if plan.decode else config.max_draft_tokens),
            max_prompt_tokens=config.max_num_batched_tokens
            if shape.max_prompt_tokens
            else 0,
            features=shape.features,
            max_rounds=shape.max_rounds,
            template=shape.template,
        )
        return super().launch(plan, padded), padded

    def fetch(self, result: Any, shape: StepShape) -> StepResult | DraftPrefillResult:
        return super().fetch(*result)


class OneProgramRunner(OneShapeRunner):
    """Runs prompts, drafts and plain rounds in one program, for tests of few rounds."""

    all_greedy = False

    def launch(self, plan: StepPlan, shape: StepShape) -> Any:
        if not shape.is_draft_prefill:
            shape = dataclasses.replace(
                shape,
                num_levels=self.config.max_draft_tokens,
                max_prompt_tokens=self.config.max_num_batched_tokens,
                features=dataclasses.replace(
                    shape.features, all_greedy=self.all_greedy
                ),
            )
        return super().launch(plan, shape)


class OneGreedyProgramRunner(OneProgramRunner):
    """Runs only greedy requests, in one program with a third of the operations."""

    all_greedy = True

    def launch(self, plan: StepPlan, shape: StepShape) -> Any:
        assert not any(one.temperature for one in plan.admissions)
        return super().launch(plan, shape)


class QuickRunner(OneProgramRunner):
    """Runs all launches in one program, for engines that load their own models.

    Compiles only programs that a launch uses.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.compiler_options = QUICK_COMPILER
        self.compiles_in_background = False


class QuickGreedyRunner(QuickRunner):
    """`QuickRunner` for greedy requests."""

    all_greedy = True


def make_engine(
    target: Any,
    draft: Any = None,
    *,
    num_draft_tokens: int = 0,
    rule: str = "standard",
    disable_by_batch_size: int | None = None,
    controller: str = FIXED,
    draft_sample_method: str = "probabilistic",
    has_one_shape: bool = False,
    is_optimized: bool = False,
    runner: type[Runner] | None = None,
    draft_tensor_parallel_size: int = 1,
    lookup: tuple[int, int] | None = None,
    suffix: dict[str, Any] | None = None,
    mask_token_id: int | None = None,
    num_side_leaves: int = 0,
    tree: str | None = None,
    head: tuple[HeadConfig, Any] | None = None,
    kept: Sequence[int] | None = None,
    draft_scheme: Scheme | None = None,
    acceptance_rates: tuple[float, ...] | None = None,
    scan_layers: bool = False,
    **settings: Any,
) -> LLMEngine:
    """Make an engine with HuggingFace models; it drafts only if given a proposer.

    Args:
        lookup: Longest and shortest n-gram that n-gram drafts match, with or without a
            draft model.
        suffix: Options of suffix drafts that differ from the defaults, without the
            prefix "suffix_decoding_"; with or without a draft model.
        mask_token_id: Mask token of a draft model that proposes all drafts in one pass.
        num_side_leaves, tree: Keys of `SpeculativeConfig`; a tree's nodes determine the
            number of drafts.
        head: Config and parameters of a head.
        kept: Token ids that remain in a draft model with a trimmed vocabulary.
        draft_scheme: Quantization of a draft model's matrices.
        acceptance_rates: Rates of the acceptance rule "synthetic".
        scan_layers: Whether both models run their layers in a scan.
        has_one_shape: Run every launch in the largest shape: far fewer compilations.
        is_optimized: Compile with users' options instead of `QUICK_COMPILER`.
        settings: Fields of `EngineConfig` that override `SETTINGS`.
    """
    of_model = "draft_model" if mask_token_id is None else "pard"
    kinds = {"ngram": lookup, "suffix": suffix, of_model: draft}
    names = [name for name, kind in kinds.items() if kind is not None]
    if head is not None:
        names.append(head[0].kind)
    assert (not names) == (num_draft_tokens == 0)
    speculative, num_kept = None, None if kept is None else len(kept)
    if num_draft_tokens:
        speculative = SpeculativeConfig(
            method="+".join(names),
            model=None if draft is None and head is None else "draft",
            prompt_lookup_max=lookup and lookup[0],
            prompt_lookup_min=lookup and lookup[1],
            num_speculative_tokens=num_draft_tokens,
            num_side_leaves=num_side_leaves,
            speculative_token_tree=tree,
            rejection_sample_method=rule,
            synthetic_acceptance_rates=acceptance_rates,
            draft_sample_method=draft_sample_method,
            disable_by_batch_size=disable_by_batch_size,
            controller=controller,
            draft_tensor_parallel_size=draft_tensor_parallel_size,
            **({} if suffix is None else suffix_keys(suffix)),
            draft_vocab_size=num_kept,
        )
    values: dict[str, Any] = dict(
        model="target",
        tokenizer="stub",
        served_model_name="target",
        model_config=model_config(target, scan_layers=scan_layers),
        speculative=speculative,
        draft_model_config=(
            None
            if draft is None
            else model_config(
                draft,
                scan_layers=scan_layers,
                mask_token_id=mask_token_id,
                draft_vocab_size=num_kept,
                quantization=draft_scheme,
            )
        ),
        draft_token_ids=None if kept is None else tuple(sorted(kept)),
        head_config=head and head[0],
    )
    config = EngineConfig(**(DEFAULTS | values | SETTINGS | settings))
    kind = runner or (OneShapeRunner if has_one_shape else Runner)
    made = _make_runner(kind, config, target, draft, head and head[1])
    if is_optimized:
        made.compiler_options = (made.compiler_options or {}) | USERS_COMPILER
    else:
        made.compiler_options = QUICK_COMPILER
    # Launches wait for their best program, so that results do not depend on timing.
    made.compiles_in_background = False
    made.cache = ProgramCache(PROGRAMS)
    return _over(config, made)


@contextlib.contextmanager
def users_programs() -> Iterator[None]:
    """Make engines that are created in this context compile with users' options."""
    options = cpu.COMPILER_OPTIONS | USERS_COMPILER
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "compiler_options", lambda: options)
        yield


def suffix_keys(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the default options of suffix drafts, with `changes` to them."""
    prefix = "suffix_decoding_"
    return SUFFIX_DEFAULTS | {prefix + name: one for name, one in changes.items()}


def _make_runner(
    kind: type[Runner],
    config: EngineConfig,
    target: Any,
    draft: Any,
    head_params: Any = None,
) -> Runner:
    mesh = build_mesh(config)

    def load(model: Any, axes: tuple[str, ...], **options: Any) -> Any:
        scan_layers = config.model_config.scan_layers
        return load_weights(
            model,
            jnp.dtype(config.dtype),
            mesh,
            axes,
            scan_layers=scan_layers,
            **options,
        )

    draft_params = head_params
    if draft is not None:
        assert config.draft_model_config is not None
        draft_params = load(
            draft,
            DRAFT_MESH_AXES,
            token_ids=config.draft_token_ids,
            scheme=config.draft_model_config.quantization,
        )
    return kind(config, mesh, load(target, TARGET_MESH_AXES), draft_params)


def load_weights(
    model: Any,
    dtype: jnp.dtype,
    mesh: Mesh,
    axes: tuple[str, ...],
    *,
    scan_layers: bool = False,
    token_ids: Sequence[int] | None = None,
    scheme: Scheme | None = None,
) -> Any:
    """Return a HuggingFace model's weights as an engine's parameters."""
    config = model_config(
        model,
        scan_layers=scan_layers,
        draft_vocab_size=None if token_ids is None else len(token_ids),
        quantization=scheme,
    )
    return load_params(
        config,
        hf_tensors(model),
        dtype=dtype,
        mesh=mesh,
        mesh_axes=axes,
        token_ids=token_ids,
    )


def with_settings(engine: LLMEngine, *, seed: int = 0, **speculative: Any) -> LLMEngine:
    """Return a new engine with an idle engine's runner: nothing is recompiled.

    Args:
        speculative: Changed fields of `SpeculativeConfig`. No executable may depend on
            them; the acceptance rule, for example, is data.
    """
    assert not engine.has_unfinished_requests()
    changed = engine.config.speculative
    if speculative:
        assert changed is not None
        assert "draft_sample_method" not in speculative
        changed = dataclasses.replace(changed, **speculative)
    config = dataclasses.replace(engine.config, seed=seed, speculative=changed)
    return _over(config, engine.runner)


def _over(config: EngineConfig, runner: Runner) -> LLMEngine:
    tokenizer = StubTokenizer(config.model_config.vocab_size)
    return LLMEngine(config, runner=runner, tokenizer=tokenizer)


def make_llm(engine: Any) -> LLM:
    """Return an `LLM` that calls an existing engine."""
    with pytest.MonkeyPatch.context() as patch:
        made = SimpleNamespace(from_engine_args=lambda args: engine)
        patch.setattr(jaxspec.llm, "LLMEngine", made)
        return LLM("folder")


def generate(
    engine: LLMEngine,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
) -> list[RequestOutput]:
    """Run requests until they finish; return outputs in the order of the prompts."""
    listed = params if isinstance(params, list) else [params] * len(prompts)
    for index, (prompt, own) in enumerate(zip(prompts, listed, strict=True)):
        engine.add_request(str(index), prompt, own)
    finished = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
    return [finished[str(index)] for index in range(len(prompts))]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    """Return the generated token ids of each output."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def with_draft(engine: LLMEngine, draft: Any) -> LLMEngine:
    """Return a new engine with another draft of the same sizes, without compiling."""
    old, scan_layers = engine.runner, engine.config.model_config.scan_layers
    same = model_config(draft, scan_layers=scan_layers)
    assert engine.config.draft_model_config == same
    params = load_weights(
        draft, old.dtype, old.mesh, DRAFT_MESH_AXES, scan_layers=scan_layers
    )
    return with_params(engine, params)


def with_params(engine: LLMEngine, params: Any, target_params: Any = None) -> LLMEngine:
    """Return a new engine with other proposer parameters, without compiling."""
    config, old = engine.config, engine.runner
    assert old.params[1][-1] is not None
    runner = type(old)(config, old.mesh, target_params or old.params[0], params)
    # Executables take the parameters as arguments.
    runner.compiler_options, runner.cache = old.compiler_options, old.cache
    runner.compiler, runner.compiles_in_background = (
        old.compiler,
        old.compiles_in_background,
    )
    runner.token_masks = old.token_masks  # compiled programs call it
    return _over(config, runner)


def make_micro(seed: int = 0, **changes: Any) -> Any:
    """Make a two-layer target of 16 tokens, with distributions of medium entropy."""
    return make_hf_model(seed=seed, **(MICRO | changes))


def make_draft_of(target: Any, *, num_layers: int = 1, sign: float = 1.0) -> Any:
    """Make a draft that agrees with its target often, or rarely if `sign` is -1.

    It has the target's embedding and first `num_layers` layers, but the outputs of all
    layers after the first are made small. A `sign` of -1 in the final norm inverts the
    logits.
    """
    sizes = target.config.to_dict()
    changes = {name: sizes[name] for name in (*MICRO, "final_logit_softcapping")}
    draft = make_hf_model(**(changes | dict(num_hidden_layers=num_layers)))
    draft.load_state_dict(target.state_dict(), strict=False)
    with torch.no_grad():
        # Gemma's norms scale by 1 + weight.
        for layer in draft.model.layers[1:]:
            for norm in (
                layer.post_attention_layernorm,
                layer.post_feedforward_layernorm,
            ):
                norm.weight.copy_((1 + norm.weight) * DIMMED - 1)
        norm = draft.model.norm
        norm.weight.copy_(sign * (1 + norm.weight) - 1)
    return draft
