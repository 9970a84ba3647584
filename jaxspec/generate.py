"""Owns `python -m jaxspec generate`: one prompt streamed, then what speculation gained.

Uses the engine as any caller would: `add_request` and `step`.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.inputs import PromptType
from jaxspec.outputs import CompletionOutput, RequestSpecDecodeMetrics
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from jaxspec.terminal import Printer, pieces_of
from jaxspec.tokenizer import Tokenizer

# Compiles all that a longer request needs: the prompt's programs and the round's.
WARM_UP_TOKENS = 3

Show = Callable[[CompletionOutput], None]


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """One request that has run to its end.

    Attributes:
        first_token_s: From the request to its first token.
        decode_s: From the first token to the last.
        num_rounds: Rounds between the two.
        drafts: None when nothing was drafted.
    """

    text: str
    token_ids: list[int]
    first_token_s: float
    decode_s: float
    num_rounds: int
    drafts: RequestSpecDecodeMetrics | None

    @property
    def tokens_per_s(self) -> float | None:
        """Speed after the first token; None when there was no second one."""
        if not self.num_rounds or not self.decode_s:
            return None
        return (len(self.token_ids) - 1) / self.decode_s


def run(options: argparse.Namespace) -> None:
    """Run the subcommand.

    Raises:
        ArgumentError: An option cannot work; nothing has run on the device.
    """
    params, notes = _sampling(options)
    engine = load_engine(options)
    try:
        prompt = make_prompt(engine.tokenizer, options.prompt, is_chat=options.is_chat)
        plain = without_speculation(params) if options.is_compared else None
        start = time.monotonic()
        _progress("Compiling ... ")
        warm_up(engine, prompt, params)
        if plain is not None:
            warm_up(engine, prompt, plain)
        _progress(f"{time.monotonic() - start:.1f} s\n")

        speculative = _shown(engine, prompt, params)
        compared = None if plain is None else decode(engine, prompt, plain)
        print(f"\n{_setting(engine, options, params)}", *notes, sep="\n")
        print(comparison(speculative, compared))
    finally:
        engine.shutdown()


def load_engine(options: argparse.Namespace) -> LLMEngine:
    """Load the models that the options name, for one request at a time.

    Raises:
        ArgumentError: An option cannot work; nothing has been loaded.
    """
    args = EngineArgs(
        model=options.model,
        speculative_model=options.speculative_model,
        num_speculative_tokens=options.num_speculative_tokens,
        ngram_prompt_lookup_max=options.ngram_prompt_lookup_max,
        dtype=options.dtype,
        max_num_seqs=1,
        compilation_cache_dir=options.compilation_cache_dir,
    )
    config = args.create_engine_config()
    start = time.monotonic()
    _progress(f"Loading {options.model} and {options.speculative_model} ... ")
    engine = LLMEngine(config)
    _progress(f"{time.monotonic() - start:.1f} s\n")
    return engine


def _shown(engine: LLMEngine, prompt: PromptType, params: SamplingParams) -> Decoded:
    """Decode a text, writing it as it comes."""
    printer = Printer(sys.stdout)
    if printer.has_colours:
        params = params.clone()
        params.extra_args = {"return_token_origins": True}
    decoded = decode(
        engine, prompt, params, lambda output: printer.show(pieces_of(output))
    )
    print("\n" if printer.has_colours else "")
    printer.explain()
    return decoded


def _sampling(options: argparse.Namespace) -> tuple[SamplingParams, list[str]]:
    """The request's parameters, and what to tell the user about them."""
    params = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        seed=options.seed,
        ignore_eos=options.ignore_eos,
        output_kind=RequestOutputKind.DELTA,
    )
    if params.is_greedy or params.seed is not None:
        return params, []
    params.seed = 0
    note = "No --seed was given: seed 0 was used, which makes the texts comparable."
    return params, [note]


def make_prompt(tokenizer: Tokenizer, text: str, *, is_chat: bool) -> PromptType:
    """The text as a user's turn that the model answers, or as it is.

    In a turn, special tokens that the text spells are ordinary text.
    """
    if not is_chat:
        return text
    written, token_ids = tokenizer.write_chat([{"role": "user", "content": text}])
    return {"prompt": written, "prompt_token_ids": token_ids}


def without_speculation(params: SamplingParams) -> SamplingParams:
    """The same request, decoded one token a round."""
    plain = params.clone()
    plain.extra_args = {"num_speculative_tokens": 0}
    return plain


def warm_up(engine: LLMEngine, prompt: PromptType, params: SamplingParams) -> None:
    """Build every program that decoding `prompt` with `params` needs.

    A launch whose own program is not there may run in another one and ask for its own,
    which is made meanwhile: so all that was asked for, until nothing is.
    """
    short = params.clone()
    assert short.max_tokens is not None
    short.max_tokens = min(short.max_tokens, WARM_UP_TOKENS)
    short.ignore_eos = True
    num_compiles = None
    while engine.runner.num_compiles != num_compiles:
        num_compiles = engine.runner.num_compiles
        decode(engine, prompt, short)
        engine.wait_for_programs()


def decode(
    engine: LLMEngine,
    prompt: PromptType,
    params: SamplingParams,
    show: Show | None = None,
) -> Decoded:
    """Run one request on an idle engine to its end.

    Args:
        engine: Has no other request.
        prompt: As for `LLMEngine.add_request`.
        params: With `output_kind` DELTA, so that every round gives one output.
        show: Called with every output as it comes.
    """
    assert params.output_kind is RequestOutputKind.DELTA
    engine.add_request("generate", prompt, params)
    text, token_ids, num_outputs, last = "", [], 0, None
    try:
        while engine.has_unfinished_requests():
            for last in engine.step():
                (output,) = last.outputs
                text += output.text
                token_ids += output.token_ids
                num_outputs += 1
                if show is not None:
                    show(output)
    except BaseException:
        engine.abort_request("generate")
        raise
    assert last is not None
    assert last.finished
    assert last.metrics is not None
    return Decoded(
        text=text,
        token_ids=token_ids,
        first_token_s=last.metrics.first_token_latency,
        decode_s=last.metrics.last_token_ts - last.metrics.first_token_ts,
        num_rounds=num_outputs - 1,
        drafts=last.outputs[0].spec_decode_metrics,
    )


def comparison(speculative: Decoded, plain: Decoded | None) -> str:
    """The table under the text: both runs side by side, at most 80 columns wide."""
    runs = [speculative] if plain is None else [speculative, plain]
    rows = [
        ("", *("speculative", "plain")[: len(runs)]),
        ("tokens", *(str(len(one.token_ids)) for one in runs)),
        ("tokens/s", *(_number(one.tokens_per_s, ".1f") for one in runs)),
        ("first token, ms", *(f"{one.first_token_s * 1e3:.1f}" for one in runs)),
        ("rounds", *(str(one.num_rounds) for one in runs)),
    ]
    drafts = speculative.drafts
    if drafts is not None and drafts.num_spec_steps:
        rows += [
            ("acceptance rate", f"{drafts.acceptance_rate:.3f}"),
            ("mean acceptance length", f"{drafts.mean_acceptance_length:.2f}"),
        ]
    if plain is not None:
        speeds = speculative.tokens_per_s, plain.tokens_per_s
        ratio = speeds[0] / speeds[1] if speeds[0] and speeds[1] else None
        rows += [
            ("speed-up", _number(ratio, ".2f", "x")),
            ("texts", difference(speculative.token_ids, plain.token_ids)),
        ]
    lines = [
        f"{row[0]:<24}" + "".join(f"{cell:>14}" for cell in row[1:]) for row in rows
    ]
    lines.append("tokens/s: of one run, after the first token, without compilation")
    return "\n".join(lines)


def difference(left: list[int], right: list[int]) -> str:
    """Say "equal", or at which token (counted from 1) two texts part."""
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
    """The line above the table: what ran, and where."""
    runner = engine.runner
    device = runner.mesh.devices.flat[0]
    how = "greedy"
    if not params.is_greedy:
        how = f"temperature {params.temperature:g}, seed {params.seed}"
    return (
        f"{options.model}, {runner.dtype} on {device.platform}, "
        f"K = {options.num_speculative_tokens}, {how}"
    )


def _progress(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)
