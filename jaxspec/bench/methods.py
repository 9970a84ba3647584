"""Owns `spec --all-methods`: every way to propose drafts that there is for a target.

What is looked up in the text needs nothing; the draft model is the flags' own; heads
and further draft models are folders. Each has an engine, one after the other, on the
same prompts, and each is compared with plain decoding in turn with it, as `forms` does.
"""

import argparse
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.bench import forms
from jaxspec.bench.forms import Cell, Form, Found
from jaxspec.bench.offline import Offline, open_offline, sweep_of
from jaxspec.bench.report import milliseconds, table, write
from jaxspec.config.methods import (
    DEFAULT_DRAFT_TOKENS,
    DRAFT_MODEL,
    METHODS,
    PARD,
    method_of,
    with_draft_model,
)
from jaxspec.engine.model_folders import (
    BUNDLED_HEADS,
    BUNDLED_TARGET,
    model_folder,
)
from jaxspec.engine.speculative_args import (
    SPECULATIVE_NAMES,
    merge_speculative_arguments,
)
from jaxspec.errors import ConfigError, check_integer, wrong_argument
from jaxspec.models.families import config_from_folder
from jaxspec.models.heads.config import read_dummy
from jaxspec.serve.flags import engine_args
from jaxspec_checkpoints import read_config
from jaxspec_checkpoints.heads import KINDS, kind_of_head

FLAG = "--all-methods"
# Keys of a draft model, and of nothing else, that go from the flags to what has one.
_OF_MODEL = ("model", "draft_tensor_parallel_size")


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to propose drafts.

    Attributes:
        name: The method's; with the folder's, where it came with `--all-methods`.
        config: `speculative_config` of its engine.
    """

    name: str
    config: dict[str, Any]


def methods_of(options: argparse.Namespace) -> list[Method]:
    """All that there is for the target of a command line.

    Raises:
        ConfigError: A folder holds neither a head nor a draft model.
    """
    args = vars(engine_args(dict(vars(options))))
    given = merge_speculative_arguments(args) or {}
    count = given.get("num_speculative_tokens", DEFAULT_DRAFT_TOKENS)
    common = {"num_speculative_tokens": count}
    lookups = [name for name, row in METHODS.items() if not row.weights]
    found = [Method(name=name, config=common | {"method": name}) for name in lookups]
    own_method = method_of(given.get("method", DRAFT_MODEL))
    if own_method.has_draft_model and not own_method.has_one_pass:
        own = {name: given[name] for name in _OF_MODEL if name in given}
        if own:
            found += [
                Method(name=name, config=common | own | {"method": name})
                for name in (DRAFT_MODEL, *map(with_draft_model, lookups))
            ]
    elif "model" in given:
        found.append(_of_folder(given["model"], count))
    names = options.all_methods
    if not names and args["model"] == BUNDLED_TARGET:
        names = BUNDLED_HEADS
    return found + [_of_folder(name, count) for name in names]


def _of_folder(name: str, count: int) -> Method:
    """What a folder proposes with: a head, or a draft model of either kind."""
    folder = model_folder(name, FLAG)
    kind = kind_of_head(read_config(folder)[0])
    if kind in KINDS:
        most = read_dummy(folder).max_drafts
        count = count if most is None else min(count, most)
    else:
        has_mask = config_from_folder(folder).mask_token_id is not None
        kind = PARD if has_mask else DRAFT_MODEL
    return Method(
        name=f"{kind} {Path(name).name}",
        config={
            "method": kind,
            "model": name if name in BUNDLED_HEADS else str(folder),
            "num_speculative_tokens": count,
        },
    )


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run `spec` over methods; returns what `--json` prints.

    Raises:
        ArgumentError: A flag cannot work; nothing was run.
        BenchError: Nothing that was measured means anything.
    """
    for name in ("forms", "draft_tokens", "plot"):
        value = getattr(options, name)
        if value is not None:
            flag = "--" + name.replace("_", "-")
            raise wrong_argument(ConfigError, flag, f"left out with {FLAG}", value)
    sweep_of(options)
    methods, done = methods_of(options), list[tuple[Found, int | None]]()
    result: dict[str, Any] = {}
    for method in methods:
        offline = _open(options, method)
        if not done:
            result = offline.new_result("spec")
            # Without one the flags mean the bundled target.
            result["arguments"] |= {"model": engine_args(dict(vars(options))).model}
            result["device"] = offline.device()
            offline.print_label()
        found = forms.measure(offline, Form(method.name, forms.CHAIN))
        memory = offline.engine.memory
        done.append((found, None if memory is None else memory.draft_bytes))
        offline.engine.shutdown()
        print(f"{method.name}: done, {len(done)} of {len(methods)}", flush=True)
    rows = [(cell, num_bytes) for found, num_bytes in done for cell in found.cells]
    verdict = answer([cell for cell, _ in rows])
    print(f"\n{method_table(rows)}\n\n" + "\n".join(verdict) + "\n")
    result |= {
        "methods": [
            _as_json(method, *one) for method, one in zip(methods, done, strict=True)
        ],
        "answer": verdict,
    }
    write(result, options.output_json)
    return [result]


def _open(options: argparse.Namespace, method: Method) -> Offline:
    """An engine with these drafts, and the prompts."""
    changed = copy.copy(options)
    for name in SPECULATIVE_NAMES:
        setattr(changed, name, None)
    changed.speculative_config = method.config
    # Without a model the flags mean the bundled pair, and name its draft themselves.
    changed.model = engine_args(dict(vars(options))).model
    changed.model_tag = None
    sizes, _ = sweep_of(options)
    number = options.num_prompts or sizes[-1]
    check_integer(ConfigError, "--num-prompts", number, low=sizes[-1])

    offline = open_offline(changed, num_prompts=number, num_seqs=sizes[-1])
    offline.options = options  # as they were given
    return offline


def _as_json(method: Method, found: Found, num_bytes: int | None) -> dict[str, Any]:
    return {
        "name": method.name,
        "speculative_config": method.config,
        "num_levels": found.cells[0].num_levels,
        "memory_bytes": num_bytes,
        "points": found.points,
        "parts": [one.as_json() for parts in found.parts.values() for one in parts],
    }


def method_table(rows: Sequence[tuple[Cell, int | None]]) -> str:
    """All methods at every temperature and batch size."""
    columns = ["temperature, batch, method", "K", "acceptance by position"]
    columns += ["tokens/round", "round, ms", "plain, ms", "speed-up", "least", "MiB"]
    lines = [columns]
    for cell, num_bytes in sorted(
        rows, key=lambda row: (row[0].temperature, row[0].batch_size)
    ):
        rates = cell.acceptance.per_position_rates
        lines.append(
            [
                f"{cell.temperature:g}, {cell.batch_size}, {cell.form}",
                str(cell.num_levels),
                " ".join(f"{rate:.2f}" for rate in rates) or "-",
                f"{cell.tokens_per_round:.2f}",
                milliseconds(cell.round_s),
                milliseconds(cell.plain_round_s),
                f"{cell.speed_up:.2f}",
                f"{cell.least:.2f}",
                "-" if num_bytes is None else f"{num_bytes / 2**20:.1f}",
            ]
        )
    return (
        "Ways to propose drafts by plain decoding beside each (medians); MiB are what "
        f"proposes and its pages:\n{table(lines)}"
    )


def answer(cells: Sequence[Cell]) -> list[str]:
    """Say in words which method to choose, at each temperature and batch size."""
    lines = []
    for place in sorted({(cell.temperature, cell.batch_size) for cell in cells}):
        here = [c for c in cells if (c.temperature, c.batch_size) == place]
        best = max(here, key=lambda cell: cell.speed_up)
        told = f"{best.form}, {best.speed_up:.2f} times as fast as plain decoding"
        if best.speed_up < forms.WORTH:
            told = f"no drafts; {best.form} would be {best.speed_up:.2f} times as fast"
        lines.append(f"Temperature {place[0]:g}, batch {place[1]}: {told}.")
    return lines
