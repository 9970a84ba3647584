"""Owns `python -m jaxspec generate`: one text, and its speed against plain decoding.

Uses the engine's public interface: `add_request` and `step`.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from jaxspec.bench.acceptance import Acceptance
from jaxspec.bench.measure import Batch, Bench, Run, run_batch
from jaxspec.cli.terminal import Printer, pieces_of
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.errors import ArgumentError, check_utf8
from jaxspec.sampling_params import SAMPLING_FIELDS, RequestOutputKind, SamplingParams
from jaxspec.text.chat_template import can_hold_template, folder_template
from jaxspec.text.tokenizer import Tokenizer

# Options that have the name of a field of `SamplingParams`.
SAMPLING_OPTIONS = ("max_tokens", *SAMPLING_FIELDS, "seed", "ignore_eos")
# Tokens to generate in the warm-up: enough to compile all programs that a longer
# request needs, for its prompt and for a round.
WARM_UP_TOKENS = 3
# Maximum number of timed runs per mode. Several are needed, because short runs vary:
# runs of 0.1 s gave speed-ups from 0.79 to 1.86 on one machine.
REPEATS = 7
# Seconds after which no further repeat begins, so that a large model is measured only
# once.
REPEAT_S = 5.0


def run(options: argparse.Namespace) -> None:
    """Run the subcommand.

    Raises:
        ArgumentError: An option is invalid; nothing has run on the device.
    """
    params, notes = _sampling(options)
    engine = load_engine(options, is_chat=bool(options.is_chat))
    try:
        is_chat = options.is_chat
        if is_chat is None:
            is_chat = engine.tokenizer.can_chat
            if not is_chat:
                notes.append(
                    "The model has no chat template, so the prompt was continued as "
                    "plain text."
                )
        prompt = encode(engine.tokenizer, options.prompt, is_chat=is_chat)
        has_drafts = engine.config.speculative is not None
        is_compared = options.is_compared and has_drafts
        plain = without_speculation(params) if is_compared else None
        start = time.monotonic()
        _progress("Compiling ... ")
        warm_up(engine, prompt, params)
        if plain is not None:
            warm_up(engine, prompt, plain)
        _progress(f"{time.monotonic() - start:.1f} s\n")

        shown, compared = [_shown(engine, prompt, params)], None
        if plain is not None:
            modes = {"speculative": params, "plain": plain}
            bench = Bench(engine=engine, num_iters=REPEATS, max_s=REPEAT_S)
            measured = bench.repeat(
                {
                    name: Batch(prompts=[prompt], params=[one])
                    for name, one in modes.items()
                }
            )
            shown, compared = (measured.runs[name] for name in modes)
        print(f"\n{_setting(engine, options, params)}", *notes, sep="\n")
        print(comparison(shown, compared, has_drafts=has_drafts))
    finally:
        engine.shutdown()


def load_engine(options: argparse.Namespace, *, is_chat: bool) -> LLMEngine:
    """Load the models that the options name, for one request at a time.

    Args:
        is_chat: Require a model trained on conversations.

    Raises:
        ArgumentError: An option is invalid, or the model was not trained on
            conversations; nothing has been loaded.
    """
    args = EngineArgs(
        model=options.model,
        speculative_model=options.speculative_model,
        speculative_config=options.speculative_config,
        num_speculative_tokens=options.num_speculative_tokens,
        ngram_prompt_lookup_max=options.ngram_prompt_lookup_max,
        dtype=options.dtype,
        quantization=options.quantization,
        speculative_model_quantization=options.speculative_model_quantization,
        quantize_embedding=options.quantize_embedding,
        max_num_seqs=1,
        compilation_cache_dir=options.compilation_cache_dir,
    )
    config = args.create_engine_config()
    folder = Path(config.tokenizer)
    if is_chat and can_hold_template(folder) and folder_template(folder) is None:
        raise ArgumentError(
            f"--model {options.model} has no chat template: it was not trained on "
            "conversations. Choose an instruction-tuned model, or let it continue a "
            'text:\n    python -m jaxspec generate "TEXT" --raw --model '
            f"{shlex.quote(str(options.model))}"
        )
    start = time.monotonic()
    drafts = options.speculative_model
    if drafts is None and config.speculative is not None:
        drafts = config.speculative.model or config.speculative.method
    names = options.model if drafts is None else f"{options.model} and {drafts}"
    _progress(f"Loading {names} ... ")
    engine = LLMEngine(config)
    _progress(f"{time.monotonic() - start:.1f} s\n")
    return engine


def _shown(engine: LLMEngine, prompt: list[int], params: SamplingParams) -> Run:
    """Decode a text, and print it as it is generated."""
    printer = Printer(sys.stdout)
    if printer.has_colors:
        params = params.clone()
        params.extra_args = {"return_token_origins": True}
    run = run_batch(
        engine,
        Batch(prompts=[prompt], params=[params]),
        lambda output: printer.show(pieces_of(output.outputs[0])),
    )
    print("\n" if printer.has_colors else "")
    printer.explain()
    return run


def _sampling(options: argparse.Namespace) -> tuple[SamplingParams, list[str]]:
    """Return the request's parameters, and notes about them for the user."""
    given = {name: getattr(options, name) for name in SAMPLING_OPTIONS}
    params = SamplingParams(**given, output_kind=RequestOutputKind.DELTA)
    if params.is_greedy or params.seed is not None:
        return params, []
    params.seed = 0
    note = "No --seed was given: seed 0 was used, which makes the texts comparable."
    return params, [note]


def encode(tokenizer: Tokenizer, text: str, *, is_chat: bool) -> list[int]:
    """Encode a text as a user's turn to answer, or as a plain prompt to continue.

    In a user's turn, special pieces such as turn markers are encoded as ordinary text.
    """
    check_utf8(ArgumentError, "the prompt", text)
    if not is_chat:
        return list(tokenizer.encode(text))
    return tokenizer.write_chat([{"role": "user", "content": text}])[1]


def without_speculation(params: SamplingParams) -> SamplingParams:
    """Return the same parameters with K = 0."""
    plain = params.clone()
    plain.extra_args = {"num_speculative_tokens": 0}
    return plain


def warm_up(engine: LLMEngine, prompt: list[int], params: SamplingParams) -> None:
    """Compile every program that decoding `prompt` with `params` needs."""
    short = params.clone()
    assert short.max_tokens is not None
    short.max_tokens = min(short.max_tokens, WARM_UP_TOKENS)
    short.ignore_eos = True
    Bench(engine=engine).warm_up(Batch(prompts=[prompt], params=[short]))


def decode(engine: LLMEngine, prompt: list[int], params: SamplingParams) -> Run:
    """Run one request on an idle engine to its end."""
    return run_batch(engine, Batch(prompts=[prompt], params=[params]))


def median_speed(runs: Sequence[Run]) -> float | None:
    """Return the median tokens/s after the first token; None if no run has a second."""
    speeds = [speed for speed in map(tokens_per_s, runs) if speed]
    return median(speeds) if speeds else None


def tokens_per_s(run: Run) -> float | None:
    """Return the tokens/s after the first token; None if there is no second one."""
    took_s = run.per_token_s[0] if run.per_token_s else 0.0
    return 1 / took_s if took_s else None


def comparison(
    speculative: Sequence[Run],
    plain: Sequence[Run] | None,
    *,
    has_drafts: bool = True,
) -> str:
    """Format the table of both modes, at most 80 columns wide.

    Args:
        speculative: Repeats of one request; medians are shown.
        plain: The same request without drafts, one run after each of the others; None
            to leave them out.
        has_drafts: Whether the engine has a proposer. Without one, `speculative` has
            plain runs and `plain` is None.
    """
    modes = [speculative] if plain is None else [speculative, plain]
    rows = [
        ("", *(("speculative", "plain") if has_drafts else ("plain",))[: len(modes)]),
        ("tokens", *(str(one[0].num_output_tokens) for one in modes)),
        ("tokens/s", *(_number(median_speed(one), ".1f") for one in modes)),
        (
            "first token, ms",
            *(
                f"{median(run.first_token_s[0] for run in one) * 1e3:.1f}"
                for one in modes
            ),
        ),
        (
            "rounds",
            *(f"{median(len(run.inter_token_s) for run in one):g}" for one in modes),
        ),
    ]
    drafts = sum((run.acceptance for run in speculative), Acceptance())
    notes, ratios = list[str](), list[float]()
    if drafts.num_drafts:
        rows += [
            ("acceptance rate", f"{drafts.rate:.3f}"),
            ("mean acceptance length", f"{drafts.mean_length:.2f}"),
        ]
    elif has_drafts:
        notes.append("No drafts: the engine predicted that they would not pay (K = 0).")
    if plain is not None:
        pairs = [
            (tokens_per_s(ours), tokens_per_s(other))
            for ours, other in zip(speculative, plain, strict=True)
        ]
        ratios = [ours / other for ours, other in pairs if ours and other]
        rows.append(
            ("speed-up", _number(median(ratios) if ratios else None, ".2f", "x"))
        )
        if len(ratios) > 1:
            rows.append(("least, most", f"{min(ratios):.2f}x, {max(ratios):.2f}x"))
        texts = [run.token_ids[0] for run in (*speculative, *plain)]
        other = next((text for text in texts if text != texts[0]), texts[0])
        rows.append(("texts", difference(texts[0], other)))
    lines = [
        f"{row[0]:<24}" + "".join(f"{cell:>14}" for cell in row[1:]) for row in rows
    ]
    count = len(speculative)
    repeats = "one run" if count == 1 else f"medians of {count} alternating runs"
    if len(ratios) > 1:
        notes.insert(
            0,
            f"speed-up: median of {len(ratios)} ratios, each of one run to the plain "
            "run after it",
        )
    lines.append(
        f"{repeats}; tokens/s are measured after the first token, without compilation"
    )
    return "\n".join(lines + notes)


def difference(left: list[int], right: list[int]) -> str:
    """Return "equal", or the number (from 1) of the first token that differs."""
    if left == right:
        return "equal"
    shared = zip(left, right, strict=False)
    where = next((i for i, (a, b) in enumerate(shared) if a != b), None)
    where = min(len(left), len(right)) if where is None else where
    return f"differs at token {where + 1}"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _setting(
    engine: LLMEngine, options: argparse.Namespace, params: SamplingParams
) -> str:
    """Format the line above the table: model, device, K and sampling."""
    runner = engine.runner
    device = runner.mesh.devices.flat[0]
    how = "greedy"
    if not params.is_greedy:
        how = f"temperature {params.temperature:g}, seed {params.seed}"
    return (
        f"{options.model}, {runner.dtype} on {device.platform}, "
        f"K = {engine.config.max_draft_tokens}, {how}"
    )


def _progress(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)
