"""Greedy texts of many prompts are equal token for token on every path of the engine.

All proposers, all draft lengths, several batch sizes; whole or chunked prompts,
preemption, prefix hits; float32 or bfloat16. The expected texts are those of plain
decoding, even where two tokens have nearly equal logits. In float32 HuggingFace must
generate the same texts, except where the logits of two tokens differ by no more than
rounding error.

`python -m tests.e2e.lossless` runs everything and writes
`benchmarks/results/lossless.json`; `--resume` runs only what the file lacks: more
prompts of a combination, or the proposers that `--proposers` names. `--table` prints
the number of texts of each proposer in the file. A test runs a small part.
"""

import argparse
import itertools
import json
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm.auto import tqdm

from jaxspec.config.token_tree import read_paths
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.runner import Runner
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from tests.conformance.proposers import LARGEST_TREE, LOOKUP, TREE
from tests.support import pair
from tests.support.engines import (
    OneGreedyProgramRunner,
    OneShapeRunner,
    generate,
    make_engine,
    tokens_of,
    with_settings,
)
from tests.support.rounds import constant_times

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "lossless.json"
PROPOSERS: dict[str, dict[str, Any]] = {
    "draft_model": dict(has_draft=True),
    "ngram": dict(has_draft=False, lookup=LOOKUP),
    "ngram+draft_model": dict(has_draft=True, lookup=LOOKUP),
    "suffix": dict(has_draft=False, suffix={}),
    "suffix+draft_model": dict(has_draft=True, suffix={}),
}
SHAPED: dict[str, dict[str, Any]] = {
    "draft_model, leaves": dict(has_draft=True, num_side_leaves=2),
    "draft_model, tree": dict(has_draft=True, tree=TREE),
    "draft_model, trimmed": dict(has_draft=True, kept=pair.KEPT),
    "draft_model, int8": dict(has_draft=True, draft_scheme=pair.INT8),
    "draft_model, int4": dict(has_draft=True, draft_scheme=pair.INT4),
    "draft_model, int4, trimmed": dict(
        has_draft=True, draft_scheme=pair.INT4, kept=pair.KEPT
    ),
    "ngram, leaves": dict(has_draft=False, lookup=LOOKUP, num_side_leaves=1),
    "ngram, tree": dict(has_draft=False, lookup=LOOKUP, tree=TREE),
    "ngram+draft_model, leaves": dict(has_draft=True, lookup=LOOKUP, num_side_leaves=1),
    "suffix, leaves": dict(has_draft=False, suffix={}, num_side_leaves=1),
}
LARGE: dict[str, dict[str, Any]] = {
    "draft_model, largest tree": dict(has_draft=True, tree=LARGEST_TREE),
}
ALL = PROPOSERS | SHAPED | LARGE
DRAFTS = (1, 2, 3, 5, 8)
BATCHES = (1, 8, 32)
PATHS = ("whole", "chunked", "preempted", "prefix")
PAGE_SIZE, LONGEST_PROMPT = 4, 96

Texts = list[list[int]]
# Key of a combination: proposer, number of drafts, batch size, path.
Played = tuple[str, int, int, str]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The combinations that a run covers, and their numbers of prompts.

    Attributes:
        family: Family of both models: `pair.GEMMA2` or `pair.GEMMA3`.
        alone: Number of prompts at batch size 1, which takes many rounds.
        has_one_program: Use one program for prompts, drafts and plain rounds. Its
            rounds are slower, but a short run saves more time by compiling less.
        has_local_pages: Layers with a sliding window keep only their window, as by
            default; recorded texts were made without.
    """

    family: str = pair.GEMMA2
    num_prompts: int = 1000
    num_tokens: int = 128
    proposers: tuple[str, ...] = tuple(PROPOSERS)
    drafts: tuple[int, ...] = DRAFTS
    batches: tuple[int, ...] = BATCHES
    paths: tuple[str, ...] = PATHS
    alone: int = 1000
    is_optimized: bool = True
    has_one_program: bool = False
    dtype: str = "float32"
    has_local_pages: bool = False

    @property
    def max_model_len(self) -> int:
        return LONGEST_PROMPT + self.num_tokens

    @property
    def pages_per_seq(self) -> int:
        return -(-self.max_model_len // PAGE_SIZE)

    @property
    def runner(self) -> type[Runner]:
        return OneGreedyProgramRunner if self.has_one_program else OneShapeRunner

    def count(self, batch: int) -> int:
        """Return the number of prompts that are run at a batch size."""
        return min(self.alone, self.num_prompts) if batch == 1 else self.num_prompts


# `make test` runs a few variants of this part.
SHORT = Cut(
    num_prompts=24,
    num_tokens=32,
    proposers=("ngram+draft_model",),
    drafts=(3,),
    batches=(8,),
    is_optimized=False,
    has_one_program=True,
    has_local_pages=True,
)


@dataclass(frozen=True, kw_only=True)
class Play:
    """Results of one combination of proposer, number of drafts, batch size and path."""

    proposer: str
    num_drafts: int
    batch: int
    path: str
    num_prompts: int
    num_equal: int
    acceptance_rate: float
    num_preemptions: int
    num_cached_tokens: int

    @property
    def played(self) -> Played:
        return self.proposer, self.num_drafts, self.batch, self.path

    def __add__(self, other: "Play") -> "Play":
        """Merge the results of other prompts of the same combination."""
        assert self.played == other.played
        count = self.num_prompts + other.num_prompts
        rates = self.acceptance_rate * self.num_prompts
        rates += other.acceptance_rate * other.num_prompts
        return replace(
            self,
            num_prompts=count,
            num_equal=self.num_equal + other.num_equal,
            acceptance_rate=round(rates / count, 4),
            num_preemptions=self.num_preemptions + other.num_preemptions,
            num_cached_tokens=self.num_cached_tokens + other.num_cached_tokens,
        )


def prompts_of(count: int) -> list[list[int]]:
    """Return prompts with shared prefixes and random tails; a third are repetitive."""
    random = np.random.default_rng(17)
    families = [random.integers(3, 64, 12 + 5 * i).tolist() for i in range(8)]
    prompts = []
    for index in range(count):
        tail = random.integers(3, 64, random.integers(1, 24)).tolist()
        prompt = families[index % len(families)] + tail
        if index % 3 == 0:
            prompt = (prompt * 4)[:LONGEST_PROMPT]
        prompts.append(prompt)
    return prompts


def texts_of(cut: Cut, prompts: list[list[int]], params: SamplingParams) -> Texts:
    """Return the texts of plain decoding, checked with HuggingFace's logits."""
    target = pair.target(cut.family)
    engine = make_engine(
        target,
        max_num_seqs=32,
        page_size=PAGE_SIZE,
        num_pages=32 * cut.pages_per_seq,
        max_model_len=cut.max_model_len,
        max_num_batched_tokens=512,
        runner=cut.runner,
        is_optimized=cut.is_optimized,
        dtype=cut.dtype,
    )
    said = tokens_of(generate(engine, prompts, params))
    if cut.dtype == "float32":
        both = zip(prompts, tqdm(said, desc="margins"), strict=True)
        margins = [pair.greedy_margin(*one, model=target) for one in both]
        assert min(margins) > -pair.MIN_MARGIN, "HuggingFace's text is different"
    return said


def engine_for(cut: Cut, proposer: str, batch: int) -> LLMEngine:
    """Return an engine whose K is the maximum; requests and paths then use less."""
    kind = dict(ALL[proposer])
    has_draft, tree = kind.pop("has_draft"), kind.get("tree")
    return make_engine(
        pair.target(cut.family),
        pair.draft("noisy", cut.family) if has_draft else None,
        **kind,
        num_draft_tokens=len(read_paths(tree)) if tree else max(cut.drafts),
        max_num_seqs=batch,
        page_size=PAGE_SIZE,
        # More pages than a full batch needs, so that cached prefixes remain: a prompt
        # and the next with its prefix are eight prompts apart. Each leaves pages of
        # both kinds.
        num_pages=cut.pages_per_seq * (batch + 8 * (1 + 2 * cut.has_local_pages)),
        max_model_len=cut.max_model_len,
        max_num_batched_tokens=128,
        runner=cut.runner,
        is_optimized=cut.is_optimized,
        dtype=cut.dtype,
        disable_hybrid_kv_cache_manager=not cut.has_local_pages,
    )


def on_path(engine: LLMEngine, cut: Cut, path: str) -> LLMEngine:
    """Return an engine with the same executables whose settings force a path."""
    fresh = with_settings(engine)
    changes: dict[str, Any] = dict(enable_prefix_caching=path == "prefix")
    if path == "chunked":
        changes["max_num_batched_tokens"] = 32
    if path == "preempted":
        # The device's page pool remains as large, but the scheduler uses a third of the
        # pages.
        batch = engine.config.max_num_seqs
        fewest = engine.config.units_per_seq
        # Sequences that keep only windows take less than the most for one prompt.
        share = fewest if cut.has_local_pages else fewest * batch // 3
        changes["num_pages"] = max(fewest, share)
    config = replace(fresh.config, **changes)
    return LLMEngine(config, runner=engine.runner, tokenizer=engine.tokenizer)


def play(cut: Cut, played: Mapping[Played, int] | None = None) -> Iterator[Play]:
    """Run every combination of `cut`; yield the results of each.

    Args:
        played: For each combination, the number of prompts that an earlier run covered.
    """
    played = played or {}
    params = SamplingParams(
        temperature=0,
        max_tokens=cut.num_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    prompts = prompts_of(cut.num_prompts)
    texts = texts_of(cut, prompts, params)
    for proposer, batch in itertools.product(cut.proposers, cut.batches):
        stop = cut.count(batch)
        left = [
            (num_drafts, path, start)
            for num_drafts, path in itertools.product(cut.drafts, cut.paths)
            if (start := played.get((proposer, num_drafts, batch, path), 0)) < stop
            # A single request cannot be preempted.
            and (batch > 1 or path != "preempted")
        ]
        if not left:
            continue
        engine = engine_for(cut, proposer, batch)
        for num_drafts, path, start in left:
            made = on_path(engine, cut, path)
            own = params.clone()
            own.extra_args = {"num_speculative_tokens": num_drafts}
            with constant_times():
                outputs = generate(made, prompts[start:stop], own)
            said, texts_here = tokens_of(outputs), texts[start:stop]
            equal = [a == b for a, b in zip(said, texts_here, strict=True)]
            yield Play(
                proposer=proposer,
                num_drafts=num_drafts,
                batch=batch,
                path=path,
                num_prompts=stop - start,
                num_equal=sum(equal),
                acceptance_rate=round(made.stats.acceptance_rate, 4),
                num_preemptions=made.stats.num_preemptions,
                num_cached_tokens=sum(one.num_cached_tokens or 0 for one in outputs),
            )


def resumed(cut: Cut, before: Cut) -> Cut:
    """Return the union of the recorded `Cut` and the new one.

    Only the numbers of prompts and the proposers may differ between them.

    Args:
        before: The `cut` of the existing record.
    """
    widened = replace(
        before,
        num_prompts=max(before.num_prompts, cut.num_prompts),
        alone=max(before.alone, cut.alone),
        proposers=tuple(dict.fromkeys((*before.proposers, *cut.proposers))),
    )
    same = replace(
        cut,
        num_prompts=widened.num_prompts,
        alone=widened.alone,
        proposers=widened.proposers,
    )
    assert same == widened, f"another cut: {before}"
    return widened


def table(plays: Iterable[Play]) -> str:
    """Return a table with a row per proposer: combinations, texts, and equal texts."""
    rows: dict[str, list[Play]] = {}
    for one in plays:
        rows.setdefault(one.proposer, []).append(one)
    lines = [
        "| proposer | combinations | texts | equal to plain | drafts accepted |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, own in rows.items():
        rates = [one.acceptance_rate for one in own]
        cells = (
            name,
            f"{len(own)}",
            f"{sum(one.num_prompts for one in own):,}",
            f"{sum(one.num_equal for one in own):,}",
            f"{100 * min(rates):.0f} to {100 * max(rates):.0f} %",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--alone", type=int, default=1000, help="prompts at batch 1")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--proposers", nargs="+", choices=ALL, default=list(PROPOSERS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--resume", action="store_true", help="add to the output file")
    parser.add_argument(
        "--table", action="store_true", help="only print the output file's table"
    )
    options = parser.parse_args()
    plays: dict[Played, Play] = {}
    before: dict[str, Any] = {}
    if options.resume or options.table:
        before = json.loads(options.output.read_text(encoding="utf-8"))
        plays = {one.played: one for one in (Play(**each) for each in before["plays"])}
    if options.table:
        print(table(plays.values()))
        return
    cut = recorded = Cut(
        num_prompts=options.prompts,
        num_tokens=options.tokens,
        proposers=tuple(options.proposers),
        alone=options.alone,
        dtype=options.dtype,
    )
    versions = {"jax": jax.__version__, "python": platform.python_version()}
    if before:
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in before["cut"].items()
        }
        # A record without a setting was made with the setting's default.
        recorded = resumed(cut, Cut(**given))
        assert before["versions"] == versions, f"other versions: {before['versions']}"
    result: dict[str, Any] = {
        "cut": asdict(recorded),
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "versions": versions,
    }
    start = time.monotonic() - before.get("seconds", 0)
    counts = {key: one.num_prompts for key, one in plays.items()}
    for one in tqdm(play(cut, counts), desc="combinations"):
        earlier = plays.get(one.played)
        plays[one.played] = one if earlier is None else earlier + one
        result |= {
            "seconds": round(time.monotonic() - start),
            "num_texts": sum(each.num_prompts for each in plays.values()),
            "num_equal": sum(each.num_equal for each in plays.values()),
            "plays": [asdict(each) for each in plays.values()],
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: result[name] for name in ("num_texts", "num_equal")}))


if __name__ == "__main__":
    main()
