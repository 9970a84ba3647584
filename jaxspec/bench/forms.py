"""Owns `spec --forms`: drafts as a chain, with leaves beside it, and in trees.

The form of its drafts belongs to an engine, so there is one for each, after the other.
What is compared is speed by plain decoding, which runs in turn with the drafts in the
same engine: a machine that is slow for one form is slow for its plain decoding, too.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from jaxspec.bench.acceptance import Acceptance
from jaxspec.bench.measure import Batch, Measured
from jaxspec.bench.offline import PLAIN, SPECULATIVE, Offline, open_offline, sweep_of
from jaxspec.bench.parts import Parts
from jaxspec.bench.report import forced_line, milliseconds, table, write
from jaxspec.bench.summary import (
    Ranks,
    is_equal,
    parts_table,
    rank_table,
    ranks_json,
    ranks_of,
    speed_ups,
    summarise,
)
from jaxspec.config.engine import EngineConfig
from jaxspec.config.speculation import SpeculativeConfig
from jaxspec.config.token_tree import (
    MAX_NODES,
    Hits,
    RoundCost,
    best_tree,
    read_paths,
)
from jaxspec.errors import ConfigError, check_integer, wrong_argument
from jaxspec.program.tree import template_of

FLAG = "--forms"
CHAIN, LEAVES, BEST, TREE = "chain", "leaves", "best", "tree"
# The number of a form that is named without one; of a chain that is the flags' own.
DEFAULTS = {CHAIN: 0, LEAVES: 1, BEST: 16}
ALLOWED = (
    "chain, chain=K, leaves=W (W drafts beside each of a chain's), best=N (the tree "
    "of at most N drafts that should be the fastest, by what the forms before it have "
    "shown) or a tree such as '[(0,), (1,), (0, 0)]'"
)
# Less than this by the fastest chain is not worth a form of its own.
WORTH = 1.02
# Places whose drafts were compared less often say nothing of what their chance is.
LEAST_COMPARED = 50


@dataclass(frozen=True)
class Form:
    """A form of drafts, as it was named.

    Attributes:
        number: K of a chain, leaves beside each of its drafts, or of a tree all drafts.
    """

    name: str
    kind: str
    number: int = 0

    @classmethod
    def read(cls, name: str) -> "Form":
        """What a command line names.

        Raises:
            ConfigError: It is no form, or no tree.
        """
        kind, has_number, number = name.partition("=")
        if name.startswith(("[", "(")):
            read_paths(name)
            return cls(name, TREE)
        if kind not in DEFAULTS or (has_number and not number.isdecimal()):
            raise wrong_argument(ConfigError, FLAG, ALLOWED, name)
        count = int(number) if has_number else DEFAULTS[kind]
        if has_number and not count or (kind == BEST and count > MAX_NODES):
            raise wrong_argument(ConfigError, FLAG, ALLOWED, name)
        return cls(name, kind, count)

    def of(self, given: SpeculativeConfig, best: str | None) -> SpeculativeConfig:
        """The same drafts in this form.

        Args:
            best: The tree that was chosen, for a form that is one.
        """
        plain = replace(
            given,
            num_speculative_tokens=given.num_levels,
            num_side_leaves=0,
            speculative_token_tree=None,
        )
        if self.kind == CHAIN:
            return replace(
                plain, num_speculative_tokens=self.number or plain.num_levels
            )
        if self.kind == LEAVES:
            return replace(plain, num_side_leaves=self.number)
        written = self.name if self.kind == TREE else best
        return replace(
            plain,
            num_speculative_tokens=len(read_paths(written)),
            speculative_token_tree=written,
        )


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One form at one batch size and temperature, against plain decoding beside it.

    Attributes:
        num_levels: Drafts one after the other.
        num_nodes: All drafts of a sequence.
        tokens_per_round: Of a sequence, the target's own included.
        round_s: Of drafts; None where requests never decoded.
        least: The lowest speed-up of any repeat.
        acceptance: Of all repeats.
    """

    form: str
    temperature: float
    batch_size: int
    num_levels: int
    num_nodes: int
    tokens_per_round: float
    round_s: float | None
    plain_round_s: float | None
    speed_up: float
    least: float
    acceptance: Acceptance


@dataclass(frozen=True, kw_only=True)
class Found:
    """What an engine of one form has shown.

    Attributes:
        parts: Of its rounds, by batch size, the plain one first.
    """

    form: Form
    config: EngineConfig
    cells: list[Cell]
    points: list[dict[str, Any]]
    parts: dict[int, list[Parts]]

    @property
    def speculative(self) -> SpeculativeConfig:
        assert self.config.speculative is not None
        return self.config.speculative

    @property
    def has_side_paths(self) -> bool:
        """Whether drafts beside the spine are continued."""
        tree = template_of(self.speculative)
        return tree is not None and tree.has_side_paths

    def ranks(self, cell: Cell) -> Ranks:
        """What became of the drafts of a cell, by where they stand."""
        return ranks_of(self.speculative, cell.acceptance)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run `spec` over forms of drafts; returns what `--json` prints.

    Raises:
        ArgumentError: A flag cannot work; nothing was run.
        BenchError: Nothing that was measured means anything.
    """
    forms = [Form.read(name) for name in options.forms]
    for number, form in enumerate(forms):
        if form.kind == BEST and not {CHAIN, LEAVES} & {f.kind for f in forms[:number]}:
            allowed = f"{CHAIN} or {LEAVES} before {form.name}, to choose a tree by"
            raise wrong_argument(ConfigError, FLAG, allowed, options.forms)
    for name in ("draft_tokens", "plot"):
        if getattr(options, name) is not None:
            flag = "--" + name.replace("_", "-")
            value = getattr(options, name)
            raise wrong_argument(ConfigError, flag, f"left out with {FLAG}", value)
    if any(form.kind == BEST for form in forms) and not options.parts:
        hint = "It takes what rounds cost, part by part."
        raise wrong_argument(ConfigError, "--parts", f"on with {BEST}", False, hint)
    sweep_of(options)
    done: list[Found] = []
    result: dict[str, Any] = {}
    for form in forms:
        best = _choose(form, done) if form.kind == BEST else None
        if form.kind == BEST and best is None:
            continue
        offline = _open(options, form, best)
        if not done:
            result = offline.new_result("spec")
            result["device"] = offline.device()
            offline.print_label()
        done.append(measure(offline, form))
        offline.engine.shutdown()
        print(_told(done[-1], result["device"]), end="\n\n", flush=True)
    cells = [cell for found in done for cell in found.cells]
    verdict = answer(cells)
    if result["forced_acceptance"] is not None:
        verdict.append(forced_line(result["forced_acceptance"]))
    print(f"{cell_table(cells)}\n\n" + "\n".join(verdict) + "\n")
    result |= {"forms": [_as_json(found) for found in done], "answer": verdict}
    write(result, options.output_json)
    return [result]


def _open(options: argparse.Namespace, form: Form, best: str | None) -> Offline:
    def change(config: EngineConfig) -> EngineConfig:
        if config.speculative is None:
            raise ConfigError(
                f"{FLAG} compares drafts, and these flags name none: give "
                "--speculative-model or --speculative-config.",
                parameter="speculative_model",
            )
        return replace(config, speculative=form.of(config.speculative, best))

    sizes, _ = sweep_of(options)
    number = options.num_prompts or sizes[-1]
    check_integer(ConfigError, "--num-prompts", number, low=sizes[-1])
    return open_offline(options, num_prompts=number, num_seqs=sizes[-1], change=change)


def measure(offline: Offline, form: Form) -> Found:
    """All batch sizes and temperatures with the drafts of one form."""
    sizes, temperatures = sweep_of(offline.options)
    # Drafts are measured whether they pay or not.
    offline.engine.policy.is_adaptive = False
    config = offline.engine.config
    speculative = config.speculative
    assert speculative is not None
    levels = speculative.num_levels
    parts = {size: offline.parts(size, (0, levels)) for size in sizes}
    cells, points = [], []
    num_batches = sum(len(offline.prompts) // size for size in sizes)
    num_runs = 2 * num_batches * len(temperatures) * offline.options.num_iters
    with offline.bench(num_runs) as bench:
        for temperature in temperatures:
            for size in sizes:
                each = [
                    bench.alternate(modes)
                    for modes in _batches(offline, levels, size, temperature)
                ]
                measured = _together(each)
                cell = _cell(measured, form, temperature, size, speculative)
                point = _point(measured, cell)
                if offline.must_agree(temperature):
                    point["is_equal"] = all(is_equal(one, SPECULATIVE) for one in each)
                point["ranks"] = ranks_json(ranks_of(speculative, cell.acceptance))
                cells.append(cell)
                points.append(point)
    return Found(form=form, config=config, cells=cells, points=points, parts=parts)


def _batches(
    offline: Offline, levels: int, size: int, temperature: float
) -> list[dict[str, Batch]]:
    """Both modes of every full batch of prompts, one batch after the other."""
    starts = range(0, len(offline.prompts) - size + 1, size)
    found: list[dict[str, Batch]] = [{} for _ in starts]
    for name, k in ((PLAIN, 0), (SPECULATIVE, levels)):
        whole = offline.batch(k, temperature=temperature)
        for modes, start in zip(found, starts, strict=True):
            part = slice(start, start + size)
            modes[name] = Batch(prompts=whole.prompts[part], params=whole.params[part])
    return found


def _together(each: Sequence[Measured]) -> Measured:
    """Runs of several batches as if they were repeats of one."""
    return Measured(
        runs={
            mode: [run for one in each for run in one.runs[mode]]
            for mode in (PLAIN, SPECULATIVE)
        },
        num_discarded=sum(one.num_discarded for one in each),
    )


def _cell(
    measured: Measured,
    form: Form,
    temperature: float,
    size: int,
    speculative: SpeculativeConfig,
) -> Cell:
    runs = measured.runs[SPECULATIVE]
    acceptance = sum((run.acceptance for run in runs), Acceptance())
    ratio = speed_ups(measured, SPECULATIVE, is_decode=True)
    return Cell(
        form=form.name,
        temperature=temperature,
        batch_size=size,
        num_levels=speculative.num_levels,
        num_nodes=speculative.num_nodes,
        tokens_per_round=acceptance.tokens_per_round,
        round_s=_round_s(measured, SPECULATIVE),
        plain_round_s=_round_s(measured, PLAIN),
        speed_up=ratio["median"],
        least=ratio["least"],
        acceptance=acceptance,
    )


def _round_s(measured: Measured, mode: str) -> float | None:
    spans = [run.decode for run in measured.runs[mode]]
    times = [span.round_s for span in spans if span is not None]
    return median(times) if times else None


def _point(measured: Measured, cell: Cell) -> dict[str, Any]:
    return {
        "temperature": cell.temperature,
        "batch_size": cell.batch_size,
        "num_discarded_runs": measured.num_discarded,
        PLAIN: summarise(measured.runs[PLAIN]),
        SPECULATIVE: summarise(measured.runs[SPECULATIVE]),
        "decode_speed_up": speed_ups(measured, SPECULATIVE, is_decode=True),
        "tokens_per_round": cell.tokens_per_round,
    }


def _as_json(found: Found) -> dict[str, Any]:
    speculative = found.speculative
    return {
        "form": found.form.name,
        "num_levels": found.cells[0].num_levels,
        "num_nodes": found.cells[0].num_nodes,
        "num_side_leaves": speculative.num_side_leaves,
        "speculative_token_tree": speculative.speculative_token_tree,
        "points": found.points,
        "parts": [one.as_json() for parts in found.parts.values() for one in parts],
    }


def round_cost(timed: Iterable[tuple[Parts, bool]]) -> RoundCost:
    """Seconds of rounds of any tree, from those whose parts were timed.

    The target's pass goes by the rows that it is fed, the proposer's by its passes:
    between what was timed on a straight line, beyond it as between the last two.

    Args:
        timed: Parts, and whether the draft model was fed whole trees: then its passes
            are others. Where none was, they are taken to grow with rows as the
            target's do.
    """
    rows: dict[int, list[float]] = {}
    passes: dict[bool, list[float]] = {False: [], True: []}
    for one, has_side_paths in timed:
        rows.setdefault(one.num_nodes, []).append(one.verify_s + one.accept_s)
        if one.num_draft_tokens:
            passes[has_side_paths].append(one.draft_s / one.num_draft_tokens)
    counts = sorted(rows)
    assert len(counts) > 1 and passes[False], "neither a chain nor leaves were timed"
    # What is noise would make a larger tree cheaper than a smaller one.
    times = np.maximum.accumulate([median(rows[count]) for count in counts])
    slope = (times[-1] - times[-2]) / (counts[-1] - counts[-2])

    def verify_s(count: int) -> float:
        beyond = max(count - counts[-1], 0)
        return float(np.interp(count, counts, times) + slope * beyond)

    def seconds(num_levels: int, num_nodes: int, has_side_paths: bool) -> float:
        draft_s = median(passes[has_side_paths] or passes[False])
        if has_side_paths and not passes[True]:
            draft_s *= verify_s(num_nodes) / verify_s(0)
        return num_levels * draft_s + verify_s(num_nodes)

    return seconds


def _choose(form: Form, done: Sequence[Found]) -> str | None:
    """The tree that should be the fastest at the first temperature and batch size.

    Returns:
        None where that is none, but plain decoding.
    """
    ranks: Ranks = {}
    for found in done:
        for place, hits in found.ranks(found.cells[0]).items():
            known = ranks.get(place, Hits(0, 0))
            ranks[place] = Hits(known.compared + hits.compared, known.kept + hits.kept)
    rates = {
        place: hits.rate
        for place, hits in ranks.items()
        if hits.compared >= LEAST_COMPARED
    }
    size = done[0].cells[0].batch_size
    seconds = round_cost(
        (one, found.has_side_paths) for found in done for one in found.parts[size]
    )
    levels = done[0].speculative.method_info.max_draft_tokens
    best = best_tree(rates, seconds, num_nodes=form.number, num_levels=levels)
    if not best.paths:
        print(f"{form.name}: no drafts, by what was measured before it.\n")
        return None
    written = str(list(best.paths))
    print(
        f"{form.name}: {len(best.paths)} drafts, {best.tokens:.2f} tokens in "
        f"{milliseconds(best.seconds)} ms on the device should be the best:\n"
        f"speculative_token_tree = {written!r}\n"
    )
    return written


def _told(found: Found, device: dict[str, Any]) -> str:
    """One form: its cells, its ranks and its parts."""
    lines = []
    for cell in found.cells:
        where = f"temperature {cell.temperature:g}, batch {cell.batch_size}"
        lines.append(f"{cell.form}, {where}: what the target wanted")
        ranks = found.ranks(cell)
        lines.append(rank_table(ranks) if ranks else "nothing was drafted")
    for parts in found.parts.values():
        if parts:
            lines.append(parts_table(parts, device))
    return "\n".join(lines)


def cell_table(cells: Sequence[Cell]) -> str:
    """All forms at every temperature and batch size."""
    columns = ["temperature, batch, form", "drafts", "tokens/round"]
    rows = [[*columns, "round, ms", "plain, ms", "speed-up", "least"]]
    for cell in sorted(cells, key=lambda cell: (cell.temperature, cell.batch_size)):
        rows.append(
            [
                f"{cell.temperature:g}, {cell.batch_size}, {_short(cell.form)}",
                str(cell.num_nodes),
                f"{cell.tokens_per_round:.2f}",
                milliseconds(cell.round_s),
                milliseconds(cell.plain_round_s),
                f"{cell.speed_up:.2f}",
                f"{cell.least:.2f}",
            ]
        )
    return f"Forms of drafts by plain decoding beside each (medians):\n{table(rows)}"


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:20]} ..."


def answer(cells: Sequence[Cell]) -> list[str]:
    """Say in words which form to choose, at each temperature and batch size."""
    lines = []
    for place in sorted({(cell.temperature, cell.batch_size) for cell in cells}):
        here = [c for c in cells if (c.temperature, c.batch_size) == place]
        lines.append(f"Temperature {place[0]:g}, batch {place[1]}: {_chosen(here)}")
    lines.append(
        f"A form is chosen over the fastest chain for {WORTH:g} times its speed; "
        "speeds are by plain decoding."
    )
    return lines


def _chosen(cells: Sequence[Cell]) -> str:
    """The answer at one temperature and batch size."""
    best = max(cells, key=lambda cell: cell.speed_up)
    chains = [cell for cell in cells if cell.num_nodes == cell.num_levels]
    if best.speed_up < WORTH:
        return f"no drafts; {best.form} would be {best.speed_up:.2f} times as fast."
    if not chains:
        return f"{best.form}, {best.speed_up:.2f} times as fast; no chain was measured."
    chain = max(chains, key=lambda cell: cell.speed_up)
    others = [cell for cell in cells if cell not in chains]
    told = f"{chain.form}, {chain.speed_up:.2f} times as fast"
    if not others:
        return f"{told}; nothing else was measured."
    other = max(others, key=lambda cell: cell.speed_up)
    if other.speed_up >= WORTH * chain.speed_up:
        return f"{other.form}, {other.speed_up:.2f} times as fast; of chains {told}."
    return f"{told}; of the others {other.form}, {other.speed_up:.2f}."
