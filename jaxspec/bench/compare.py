"""`spec --forms`: compares shapes of drafts.

Each shape runs in an engine of its own, one after the other, with the same prompts. In
each engine plain decoding alternates with speculation, and speeds are relative to plain
decoding, so that a slow phase of the machine affects both.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from jaxspec.bench.acceptance import Acceptance
from jaxspec.bench.measure import Measured
from jaxspec.bench.offline import Offline, open_offline, sweep_of
from jaxspec.bench.parts import Parts
from jaxspec.bench.report import (
    PLAIN,
    SPECULATIVE,
    forced_line,
    milliseconds,
    table,
    write,
)
from jaxspec.bench.summary import is_equal, parts_table, speed_ups, summarize
from jaxspec.config.engine import EngineConfig
from jaxspec.config.speculation import SpeculativeConfig
from jaxspec.config.token_tree import (
    MAX_NODES,
    Hits,
    Place,
    RoundCost,
    best_tree,
    count_ranks,
    read_paths,
)
from jaxspec.engine.arg_utils import engine_args
from jaxspec.errors import ConfigError, check_integer, wrong_argument
from jaxspec.program.tree.tree import template_of

CHAIN, LEAVES, BEST, TREE = "chain", "leaves", "best", "tree"
# Default number of each shape, as in `chain=K`. 0 for a chain means the K of the other
# flags.
DEFAULTS = {CHAIN: 0, LEAVES: 1, BEST: 16}
ALLOWED_FORMS = (
    "chain, chain=K, leaves=W (W side leaves per draft of a chain), best=N (the "
    "tree of at most N drafts that is predicted to be fastest from the measurements "
    "of the shapes before it) or a tree such as '[(0,), (1,), (0, 0)]'"
)
# Minimum speed relative to the fastest chain at which a shape with side branches is
# recommended.
MIN_GAIN = 1.02
# Minimum number of times that a tree's node was compared with the target's token before
# its acceptance rate is used.
MIN_COMPARED = 50
Ranks = dict[Place, Hits]


@dataclass(frozen=True)
class Form:
    """A shape of drafts: a chain, a chain with leaves, or a tree.

    Attributes:
        name: The shape as written on the command line.
        number: K of a chain, side leaves per draft, or the number of drafts of a tree.
    """

    name: str
    kind: str
    number: int = 0

    @classmethod
    def read(cls, name: str) -> "Form":
        """Parse a shape.

        Raises:
            ConfigError: `name` is not a shape, or its tree is invalid.
        """
        kind, has_number, number = name.partition("=")
        if name.startswith(("[", "(")):
            read_paths(name)
            return cls(name, TREE)
        if kind not in DEFAULTS or (has_number and not number.isdecimal()):
            raise wrong_argument(ConfigError, "--forms", ALLOWED_FORMS, name)
        count = int(number) if has_number else DEFAULTS[kind]
        if has_number and not count or (kind == BEST and count > MAX_NODES):
            raise wrong_argument(ConfigError, "--forms", ALLOWED_FORMS, name)
        return cls(name, kind, count)

    def of(self, given: SpeculativeConfig, best: str | None) -> SpeculativeConfig:
        """Return the configuration with drafts of this shape.

        Args:
            best: The chosen tree, if this is `best`.
        """
        levels = given.num_levels
        leaves, tree = 0, None
        if self.kind == CHAIN:
            levels = self.number or levels
        elif self.kind == LEAVES:
            leaves = self.number
        else:
            tree = self.name if self.kind == TREE else best
            levels = len(read_paths(tree))
        return replace(
            given,
            num_speculative_tokens=levels,
            num_side_leaves=leaves,
            speculative_token_tree=tree,
        )


@dataclass(frozen=True, kw_only=True)
class Found:
    """Measurements of the engine of one shape.

    Attributes:
        entry: Entry of the result, with a point per batch size and temperature.
        acceptance: Acceptance at the first point.
        parts: Times of the parts of a round at the smallest batch size, first of a
            plain round, then of a round with drafts.
    """

    speculative: SpeculativeConfig
    entry: dict[str, Any]
    acceptance: Acceptance
    parts: list[Parts]

    @property
    def has_side_paths(self) -> bool:
        """Whether side branches are continued, by passes over the whole tree."""
        tree = template_of(self.speculative)
        return tree is not None and tree.has_side_paths


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare shapes; return the results that `--json` prints.

    Raises:
        ArgumentError: A flag is invalid; nothing was run.
        BenchError: The measurement is invalid.
    """
    for flag in ("--draft-tokens", "--by-category", "--resume"):
        value = getattr(options, flag[2:].replace("-", "_"))
        if value:
            raise wrong_argument(ConfigError, flag, "left out with --forms", value)
    sweep_of(options)
    result: dict[str, Any] = {}
    done: list[Found] = []
    for offline, form in _forms(options, done):
        if not done:
            result = offline.new_result("spec")
            # Without a model the flags mean the bundled target.
            result["arguments"] |= {"model": engine_args(dict(vars(options))).model}
            result["device"] = offline.device()
            offline.print_label()
        done.append(measure(offline, form, result["device"]))
        offline.engine.shutdown()
    entries = [found.entry for found in done]
    verdict = answer(entries)
    if result["forced_acceptance"] is not None:
        verdict.append(forced_line(result["forced_acceptance"]))
    print(f"\n{entry_table(entries)}\n\n" + "\n".join(verdict) + "\n")
    result |= {"forms": entries, "answer": verdict}
    write(result, options.output_json)
    return [result]


def _forms(
    options: argparse.Namespace, done: Sequence[Found]
) -> Iterator[tuple[Offline, str]]:
    """Yield each shape's engine and name; `done` has the results of earlier shapes."""
    sizes, _ = sweep_of(options)
    forms = [Form.read(name) for name in options.forms]
    for number, form in enumerate(forms):
        if form.kind == BEST and not {CHAIN, LEAVES} & {f.kind for f in forms[:number]}:
            allowed = f"{CHAIN} or {LEAVES} before {form.name}, which needs their data"
            raise wrong_argument(ConfigError, "--forms", allowed, options.forms)
    if any(form.kind == BEST for form in forms) and not options.parts:
        hint = "It needs the cost of each part of a round."
        raise wrong_argument(ConfigError, "--parts", f"on with {BEST}", False, hint)
    for form in forms:
        best = _choose(form, done) if form.kind == BEST else None
        if form.kind == BEST and best is None:
            continue

        def change(
            config: EngineConfig, form: Form = form, best: str | None = best
        ) -> EngineConfig:
            if config.speculative is None:
                raise ConfigError(
                    "--forms compares drafts, and these flags name none: give "
                    "--speculative-model or --speculative-config.",
                    parameter="speculative_model",
                )
            return replace(config, speculative=form.of(config.speculative, best))

        number = options.num_prompts or sizes[-1]
        check_integer(ConfigError, "--num-prompts", number, low=sizes[-1])
        yield (
            open_offline(
                options, num_prompts=number, num_seqs=sizes[-1], change=change
            ),
            form.name,
        )


def measure(offline: Offline, form: str, device: Mapping[str, Any]) -> Found:
    """Measure all batch sizes and temperatures on one engine, over all full batches.

    Args:
        form: Name of the shape.
        device: Result of `Offline.device`.
    """
    sizes, temperatures = sweep_of(offline.options)
    # Fixed K: drafts are measured even if they do not pay.
    offline.engine.policy.is_adaptive = False
    speculative, memory = offline.engine.config.speculative, offline.engine.memory
    assert speculative is not None
    levels = speculative.num_levels
    parts = {size: offline.parts(size, (0, levels)) for size in sizes}
    points: list[dict[str, Any]] = []
    acceptances: list[Acceptance] = []
    num_batches = sum(len(offline.prompts) // size for size in sizes)
    num_runs = 2 * num_batches * len(temperatures) * offline.options.num_iters
    with offline.bench(num_runs) as bench:
        for temperature in temperatures:
            for size in sizes:
                starts = range(0, len(offline.prompts) - size + 1, size)
                measured = Measured.join(
                    [
                        bench.alternate(
                            {
                                mode: offline.batch(
                                    k, slice(at, at + size), temperature=temperature
                                )
                                for mode, k in ((PLAIN, 0), (SPECULATIVE, levels))
                            }
                        )
                        for at in starts
                    ]
                )
                runs = measured.runs[SPECULATIVE]
                acceptances.append(sum((r.acceptance for r in runs), Acceptance()))
                point = {
                    "temperature": temperature,
                    "batch_size": size,
                    "num_discarded_runs": measured.num_discarded,
                    PLAIN: summarize(measured.runs[PLAIN]),
                    SPECULATIVE: summarize(runs),
                    "decode_speed_up": speed_ups(measured, SPECULATIVE, is_decode=True),
                    "tokens_per_round": acceptances[-1].tokens_per_round,
                }
                if offline.must_agree(temperature):
                    point["is_equal"] = is_equal(measured, SPECULATIVE)
                points.append(point)
    for found in parts.values():
        if found:
            print(f"{form}: {parts_table(found, device)}", flush=True)
    entry = {
        "form": form,
        "num_levels": levels,
        "num_nodes": speculative.num_nodes,
        "num_side_leaves": speculative.num_side_leaves,
        "speculative_token_tree": speculative.speculative_token_tree,
        "memory_bytes": None if memory is None else memory.draft_bytes,
        "points": points,
        "parts": [one.as_json() for found in parts.values() for one in found],
    }
    return Found(
        speculative=speculative,
        entry=entry,
        acceptance=acceptances[0],
        parts=parts[sizes[0]],
    )


def _name_of(entry: Mapping[str, Any]) -> str:
    """Return the shape or method of a result's entry."""
    return entry["form"] if "form" in entry else entry["name"]


def ranks_of(speculative: SpeculativeConfig, acceptance: Acceptance) -> Ranks:
    """Return how often drafts were compared and accepted, by position in the tree."""
    if speculative.parents is not None:
        return count_ranks(speculative.parents, acceptance.tree_ends)
    reached = (acceptance.num_drafts, *acceptance.per_position)
    pairs = zip(reached, acceptance.per_position, strict=False)
    return {
        Place(False, depth, 0): Hits(compared, accepted)
        for depth, (compared, accepted) in enumerate(pairs, start=1)
    }


def round_cost(timed: Iterable[tuple[Parts, bool]]) -> RoundCost:
    """Return a function that predicts the seconds of a round of any tree.

    The target's time depends on the number of nodes: it is interpolated between timed
    sizes, and extrapolated from the last two. The proposer's time depends on its number
    of passes.

    Args:
        timed: Timed parts, and whether the draft model's passes processed whole trees.
            If none did, the time of a pass over a tree is assumed to grow as the
            target's does.
    """
    rows: dict[int, list[float]] = {}
    passes: dict[bool, list[float]] = {False: [], True: []}
    for one, has_side_paths in timed:
        rows.setdefault(one.num_nodes, []).append(one.verify_s + one.accept_s)
        if one.num_draft_tokens:
            passes[has_side_paths].append(one.draft_s / one.num_draft_tokens)
    counts = sorted(rows)
    assert len(counts) > 1 and passes[False], "neither a chain nor leaves were timed"
    # A larger tree measured as cheaper than a smaller one is noise: use the larger time
    # for both.
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
    """Return the tree that is predicted to be fastest at the first measured point.

    Returns:
        None if plain decoding is predicted to be faster.
    """
    ranks: Ranks = {}
    for found in done:
        for place, hits in ranks_of(found.speculative, found.acceptance).items():
            known = ranks.get(place, Hits(0, 0))
            ranks[place] = Hits(known.compared + hits.compared, known.kept + hits.kept)
    rates = {
        place: hits.rate
        for place, hits in ranks.items()
        if hits.compared >= MIN_COMPARED
    }
    seconds = round_cost(
        (one, found.has_side_paths) for found in done for one in found.parts
    )
    levels = done[0].speculative.method_info.max_draft_tokens
    best = best_tree(rates, seconds, num_nodes=form.number, num_levels=levels)
    if not best.paths:
        print(f"{form.name}: skipped: plain decoding was faster.\n")
        return None
    written = str(list(best.paths))
    print(
        f"{form.name}: {len(best.paths)} drafts, {best.tokens:.2f} tokens in "
        f"{milliseconds(best.seconds)} ms on the device are predicted to be best:\n"
        f"speculative_token_tree = {written!r}\n"
    )
    return written


def _places(
    entries: Sequence[Mapping[str, Any]],
) -> dict[tuple[float, int], list[tuple[Mapping[str, Any], Mapping[str, Any]]]]:
    """Group the entries' points by temperature and batch size, with their entries."""
    found: dict[tuple[float, int], list[Any]] = {}
    for entry in entries:
        for point in entry["points"]:
            place = point["temperature"], point["batch_size"]
            found.setdefault(place, []).append((entry, point))
    return dict(sorted(found.items()))


def entry_table(entries: Sequence[Mapping[str, Any]]) -> str:
    """Format all shapes of a result, by temperature and batch size."""
    columns = ["temperature, batch, drafts", "K", "nodes", "acceptance by position"]
    columns += ["tokens/round", "round, ms", "plain, ms", "speed-up", "least", "MiB"]
    rows = [columns]
    for (temperature, size), found in _places(entries).items():
        for entry, point in found:
            name, memory = _name_of(entry), entry["memory_bytes"]
            name = name if len(name) <= 32 else f"{name[:20]} ..."
            acceptance = point[SPECULATIVE].get("acceptance", {})
            rates = acceptance.get("acceptance_rate_per_position", ())
            rounds = [point[mode].get("round_s", {}) for mode in (SPECULATIVE, PLAIN)]
            speeds = point["decode_speed_up"]
            rows.append(
                [
                    f"{temperature:g}, {size}, {name}",
                    str(entry["num_levels"]),
                    str(entry["num_nodes"]),
                    " ".join(f"{rate:.2f}" for rate in rates) or "-",
                    f"{point['tokens_per_round']:.2f}",
                    *(milliseconds(one.get("median")) for one in rounds),
                    f"{speeds['median']:.2f}",
                    f"{speeds['least']:.2f}",
                    "-" if memory is None else f"{memory / 2**20:.1f}",
                ]
            )
    return (
        "Speed-ups against plain decoding in the same engine (medians); MiB: the "
        f"proposer and its pages:\n{table(rows)}"
    )


def answer(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return sentences on the best choice at each temperature and batch size."""
    lines = []
    for (temperature, size), found in _places(entries).items():
        speeds = [(point["decode_speed_up"]["median"], entry) for entry, point in found]
        speeds.sort(key=lambda pair: -pair[0])
        text = _chosen(speeds)
        lines.append(f"Temperature {temperature:g}, batch {size}: {text}")
    lines.append(
        "Shapes with side branches are chosen only if they are at least "
        f"{MIN_GAIN:g} times as fast as the fastest chain."
    )
    return lines


def _chosen(speeds: Sequence[tuple[float, Mapping[str, Any]]]) -> str:
    """Describe the best choice, given pairs of speed-up and entry, fastest first."""
    speed, best = speeds[0]
    if speed < MIN_GAIN:
        return (
            f"use no drafts; {_name_of(best)} would be {speed:.2f} times as fast as "
            "plain decoding."
        )
    chains = [one for one in speeds if one[1]["num_nodes"] == one[1]["num_levels"]]
    if chains and speed < MIN_GAIN * chains[0][0]:
        speed, best = chains[0]
    others = [one for one in speeds if one[1] is not best]
    text = f"choose {_name_of(best)}, {speed:.2f} times as fast as plain decoding"
    if others:
        text += f"; the next is {_name_of(others[0][1])}, {others[0][0]:.2f} times"
    return f"{text}."
