"""Prompts of benchmarks, and runs that alternate plain decoding and speculation.

Prompts are held-out documents of the training corpus, or our own short list.
"""

import argparse
import hashlib
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tqdm.auto import tqdm

from jaxspec.bench.acceptance import Acceptance
from jaxspec.bench.data import read_prompts
from jaxspec.bench.measure import Batch, Bench, Run, Span
from jaxspec.bench.report import PLAIN, SPECULATIVE
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.sampling_params import RequestOutputKind, SamplingParams

HERE = Path(__file__).parent
DOMAINS = ("math", "shell", "stories", "fiction", "code")
OPEN_TURN = "<start_of_turn>model\n"
# Number of characters of a document without turns that become the prompt.
PLAIN_CHARACTERS = 320
# Maximum characters of a question; longer ones are skipped, so that prompts take
# similar times.
MAX_CHARACTERS = 600


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """The prompts of a run, by domain, and where they come from."""

    source: str
    by_domain: dict[str, list[str]]

    @property
    def digest(self) -> str:
        """Digest that identifies the prompts of a result without their text."""
        text = json.dumps(self.by_domain, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_prompts(corpus: Path | None, per_domain: int) -> PromptSet:
    """Take prompts from `corpus`, or from `prompts.jsonl` in this folder.

    Raises:
        SystemExit: `corpus` has no valid.jsonl.xz, or too few prompts of a domain.
    """
    default = HERE.parents[1] / "shared" / "corpus"
    path = (corpus or default) / "valid.jsonl.xz"
    source, given = "held-out documents of the training corpus", _of_corpus(path)
    if corpus is None and not path.is_file():
        source, given = "benchmarks/prompts.jsonl", bundled("prompts.jsonl")
    elif not path.is_file():
        raise SystemExit(f"--corpus must be a folder with valid.jsonl.xz, got {corpus}")
    found: dict[str, list[str]] = {domain: [] for domain in DOMAINS}
    for domain, prompt in given:
        found[domain].append(prompt)
    short = {domain: len(found[domain]) for domain in DOMAINS}
    short = {domain: count for domain, count in short.items() if count < per_domain}
    if short:
        raise SystemExit(
            f"--prompts-per-domain must be at most {min(short.values())}, got "
            f"{per_domain}: these are all prompts of {source}: {short}"
        )
    # Take documents at equal distances, because neighboring documents are often alike.
    chosen = {
        domain: prompts[:: len(prompts) // per_domain][:per_domain]
        for domain, prompts in found.items()
    }
    return PromptSet(source=source, by_domain=chosen)


def bundled(name: str) -> Iterator[tuple[str, str]]:
    """Return domain and text of the prompts in a file of this folder."""
    return ((one.category, one.text) for one in read_prompts(HERE / name))


def _of_corpus(path: Path) -> Iterator[tuple[str, str]]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for document in map(json.loads, lines):
            prompt = prompt_of(document["text"])
            if prompt is not None:
                yield document["domain"], prompt


def prompt_of(text: str) -> str | None:
    """Return the start of a document, which the model continues.

    A conversation is cut where the model's first turn opens, any other text at the end
    of a word. None if it is too short or too long.
    """
    question, opening, answer = text.partition(OPEN_TURN)
    if opening:
        prompt = question + opening
        return prompt if answer and len(prompt) <= MAX_CHARACTERS else None
    if len(text) < 2 * PLAIN_CHARACTERS:
        return None
    cut = text[:PLAIN_CHARACTERS]
    end = max(cut.rfind(" "), cut.rfind("\n"))
    return cut[:end] if end > 0 else None


def sampling(num_tokens: int, num_drafts: int, **controls: Any) -> SamplingParams:
    """Return sampling parameters for `num_tokens` tokens with K = `num_drafts`."""
    return SamplingParams(
        max_tokens=num_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"num_speculative_tokens": num_drafts},
        **controls,
    )


def decode(run: Run) -> Span:
    """Return the decoding phase of the run: from its first token to its last."""
    assert run.decode is not None, "at least two tokens are needed to measure decoding"
    return run.decode


def median_speed(runs: list[Run]) -> float:
    return median(decode(run).tokens_per_s for run in runs)


@dataclass(frozen=True, kw_only=True)
class PromptRuns:
    """All repeats of one prompt, alternately with and without speculation."""

    domain: str
    num_prompt_tokens: int
    plain: list[Run]
    speculative: list[Run]

    @property
    def speed_up(self) -> float:
        return median_speed(self.speculative) / median_speed(self.plain)

    @property
    def is_equal(self) -> bool:
        """Whether all repeats, with and without drafts, gave the same text."""
        first = self.plain[0].token_ids
        return all(one.token_ids == first for one in self.plain + self.speculative)

    def as_json(self) -> dict[str, Any]:
        def speeds(runs: list[Run]) -> list[float]:
            return [round(decode(one).tokens_per_s, 2) for one in runs]

        return {
            "domain": self.domain,
            "num_prompt_tokens": self.num_prompt_tokens,
            "plain_tokens_per_s": speeds(self.plain),
            "speculative_tokens_per_s": speeds(self.speculative),
            "speed_up": round(self.speed_up, 4),
            "is_equal": self.is_equal,
        }


def run_prompts(
    engine: LLMEngine,
    prompts: list[tuple[str, str]],
    options: argparse.Namespace,
    controls: dict[str, Any],
) -> list[PromptRuns]:
    """Measure every (domain, prompt) pair with one kind of sampling."""
    bench = Bench(engine=engine, num_iters=options.repeats)
    modes = {PLAIN: 0, SPECULATIVE: options.num_speculative_tokens}
    found = []
    for domain, text in tqdm(prompts, desc=f"{controls}"):
        tokens = engine.tokenizer.encode(text)
        batches = {
            mode: Batch(
                prompts=[tokens],
                params=[sampling(options.num_tokens, count, **controls)],
            )
            for mode, count in modes.items()
        }
        runs = bench.alternate(batches).runs
        found.append(
            PromptRuns(
                domain=domain,
                num_prompt_tokens=len(tokens),
                plain=runs[PLAIN],
                speculative=runs[SPECULATIVE],
            )
        )
    return found


def summarise(runs: list[PromptRuns]) -> dict[str, Any]:
    """Return a row of the result: medians over prompts, acceptance over all rounds."""
    drafted = [one for run in runs for one in run.speculative]
    plain = [one for run in runs for one in run.plain]
    spans = [decode(one) for one in drafted]
    acceptance = sum((one.acceptance for one in drafted), Acceptance())
    speed_ups = [run.speed_up for run in runs]
    return {
        "num_prompts": len(runs),
        "num_equal": sum(run.is_equal for run in runs),
        "plain_tokens_per_s": median(median_speed(run.plain) for run in runs),
        "speculative_tokens_per_s": median(
            median_speed(run.speculative) for run in runs
        ),
        "speed_up": median(speed_ups),
        "speed_up_range": [min(speed_ups), max(speed_ups)],
        "acceptance_rate": acceptance.rate,
        "mean_acceptance_length": acceptance.mean_length,
        "tokens_per_round": sum(span.num_tokens for span in spans)
        / sum(span.num_rounds for span in spans),
        "plain_round": _round_times(plain),
        "speculative_round": _round_times(drafted),
        "plain_first_token_s": median(one.first_token_s[0] for one in plain),
        "speculative_first_token_s": median(one.first_token_s[0] for one in drafted),
    }


def _round_times(runs: list[Run]) -> dict[str, float]:
    round_s = median(decode(one).round_s for one in runs)
    host_s = median(decode(one).host_per_round_s for one in runs)
    return {"round_s": round_s, "host_s": host_s, "host_share": host_s / round_s}
