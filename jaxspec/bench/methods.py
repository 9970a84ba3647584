"""`spec --all-methods`: compares methods of proposing drafts.

Each method has an engine of its own. For every temperature, batch size and category of
prompts, plain decoding, drafts of fixed length and drafts whose length the engine
chooses alternate on the same prompts in this engine. With fixed lengths, the engine
also learns round times and acceptance, so a chosen length has warm estimates.

The result is written after every measurement, and a later run may add the missing ones.
"""

import argparse
import copy
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.bench import method_report
from jaxspec.bench.acceptance import Acceptance
from jaxspec.bench.compare import answer
from jaxspec.bench.data import BUNDLED, FILES, Prompt
from jaxspec.bench.flags import dataset
from jaxspec.bench.measure import Batch, Bench, Measured, Run
from jaxspec.bench.method_report import CHOSEN
from jaxspec.bench.offline import (
    Offline,
    engine_config,
    open_offline,
    sweep_of,
)
from jaxspec.bench.report import (
    PLAIN,
    SPECULATIVE,
    check_writable,
    commit,
    forced_line,
    machine,
    now,
    recorded_arguments,
    write_whole,
)
from jaxspec.bench.summary import is_equal, parts_table, speed_ups, summarize
from jaxspec.config.engine import EngineConfig
from jaxspec.config.methods import (
    DEFAULT_DRAFT_TOKENS,
    DRAFT_MODEL,
    METHODS,
    PARD,
    method_of,
    with_draft_model,
)
from jaxspec.engine.arg_utils import engine_args
from jaxspec.engine.loader import read_tokenizer
from jaxspec.engine.model_folders import BUNDLED_HEADS, BUNDLED_TARGET, model_folder
from jaxspec.engine.speculative_args import (
    SPECULATIVE_NAMES,
    merge_speculative_arguments,
)
from jaxspec.errors import ConfigError, check_integer, wrong_argument
from jaxspec.models.families import config_from_folder
from jaxspec.models.heads.config import read_dummy
from jaxspec_checkpoints import read_config
from jaxspec_checkpoints.heads import kind_of_head

# Options that every method with a draft model takes from the command line.
_OF_MODEL = ("model", "draft_tensor_parallel_size")
# Arguments with the number of draft tokens, and all arguments of speculation.
_COUNT = "num_speculative_tokens"
_COUNTS = [name for name, key in SPECULATIVE_NAMES.items() if key == _COUNT]
_SPECULATIVE = ("speculative_config", *SPECULATIVE_NAMES)
# Arguments that may differ when a result is resumed: they name methods and cells, each
# of which is in the result by itself.
_RESUMABLE = ("all_methods", "resume", *_SPECULATIVE)
_RESUMABLE += ("batch_sizes", "temperatures", "temperature", "parts")
# Fields of a summary that a result by category keeps: it has hundreds of cells.
_KEPT = ("elapsed_s", "decode_tokens_per_s", "round_s", "num_output_tokens")
_KEPT += ("is_full_batch", "acceptance")


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of proposing drafts.

    Attributes:
        name: The method's name, with the folder's if it is from `--all-methods`.
        config: The `speculative_config` of its engine.
    """

    name: str
    config: dict[str, Any]

    @property
    def num_draft_tokens(self) -> int:
        return self.config["num_speculative_tokens"]

    def identity(self) -> dict[str, Any]:
        """Return the fields that identify the method in a result, without paths."""
        config = dict(self.config)
        found: dict[str, Any] = {"name": self.name, "speculative_config": config}
        model = config.get("model")
        if model is not None:
            folder = model_folder(model, "--all-methods")
            config["model"] = folder.name if os.path.isabs(model) else model
            found["weights_digest"] = _digest(folder)
        return found


@dataclass(frozen=True, kw_only=True)
class Place:
    """What the methods are compared at: one cell of the table for each of them.

    Attributes:
        category: Category of the prompts; "" for all prompts together.
        first_prompt: Number of its first prompt among the engine's prompts.
        num_batches: Number of batches of `batch_size` prompts from there on.
    """

    category: str
    temperature: float
    batch_size: int
    first_prompt: int
    num_batches: int

    def is_at(self, point: Mapping[str, Any]) -> bool:
        """Return whether a point of a result was measured here."""
        found = point.get("category", ""), point["temperature"], point["batch_size"]
        return found == (self.category, self.temperature, self.batch_size)

    def slices(self) -> list[slice]:
        """Return the prompts of each batch."""
        firsts = [
            self.first_prompt + number * self.batch_size
            for number in range(self.num_batches)
        ]
        return [slice(first, first + self.batch_size) for first in firsts]


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare methods; return the results that `--json` prints.

    Raises:
        ArgumentError: A flag, a folder or the result to resume is invalid; nothing was
            run.
        BenchError: The measurement is invalid.
    """
    if options.forms:
        allowed = "left out with --all-methods"
        raise wrong_argument(ConfigError, "--forms", allowed, options.forms)
    if options.resume and options.output_json is None:
        allowed = "given with --resume: the file to resume"
        raise wrong_argument(ConfigError, "--output-json", allowed, None)
    check_writable(options.output_json, "--output-json")
    sizes, _ = sweep_of(options)
    methods = methods_of(options)
    _check_counts(options.draft_tokens, methods)
    # All configurations are checked before the first engine is made.
    configs = [engine_config(_options_of(options, one), sizes[-1]) for one in methods]
    prompts = _prompts(options, configs[0])
    places = _places(options, prompts)
    identities = [method.identity() for method in methods]
    result: dict[str, Any] = {}
    entries: list[dict[str, Any]] = []
    has_run = False
    before = _read_earlier(options, identities)
    if before is not None:
        result, entries = before, before["methods"]

    def save() -> None:
        if options.output_json is not None:
            text = json.dumps(result, allow_nan=False)
            write_whole(f"{text}\n", options.output_json)

    for method, identity in zip(methods, identities, strict=True):
        entry = next((one for one in entries if one["name"] == method.name), None)
        points = [] if entry is None else entry["points"]
        missing = [one for one in places if not any(map(one.is_at, points))]
        if not missing:
            continue
        offline = open_offline(
            _options_of(options, method),
            num_prompts=sum(map(len, prompts.values())),
            num_seqs=sizes[-1],
            prompts=list(itertools.chain(*prompts.values())),
        )
        offline.options = options  # as given on the command line
        if not result:
            result = _new_result(offline) | {"runs": [], "methods": entries}
        if not has_run:
            result["runs"].append({"date": now(), **commit(), "machine": machine()})
            has_run = True
        if entry is None:
            entry = _new_entry(offline, identity, result["device"])
            entries.append(entry)
        _measure(offline, missing, entry["points"], save)
        offline.engine.shutdown()
    result["answer"] = [*method_report.verdict(entries)]
    if options.by_category is None:
        result["answer"] += answer(entries)
    if result["forced_acceptance"] is not None:
        result["answer"].append(forced_line(result["forced_acceptance"]))
    print(f"\n{method_report.method_table(entries)}\n\n" + "\n".join(result["answer"]))
    save()
    return [result]


def _check_counts(counts: Sequence[int] | None, methods: Sequence[Method]) -> None:
    most = max(method.num_draft_tokens for method in methods)
    for k in counts or ():
        if not 1 <= k <= most:
            allowed = f"from 1 to {most}, the most draft tokens of these methods"
            raise wrong_argument(ConfigError, "--draft-tokens", allowed, k)


def _options_of(options: argparse.Namespace, method: Method) -> argparse.Namespace:
    """Return the options of an engine with one method."""
    changed = copy.copy(options)
    for name in SPECULATIVE_NAMES:
        setattr(changed, name, None)
    changed.speculative_config = method.config
    # Without a model the flags mean the bundled pair, whose draft they name.
    changed.model = engine_args(dict(vars(options))).model
    changed.model_tag = None
    return changed


def _prompts(
    options: argparse.Namespace, config: EngineConfig
) -> dict[str, list[Prompt]]:
    """Return the prompts to run, by category; "" is the category of all prompts."""
    sizes, _ = sweep_of(options)
    number = sizes[-1]
    if options.num_prompts is not None:
        check_integer(ConfigError, "--num-prompts", options.num_prompts, low=1)
        number = max(options.num_prompts, number)
    if options.by_category is None:
        return {"": dataset(options).prompts(number)}
    tokenizer = read_tokenizer(config)
    room, found = config.max_model_len - options.output_len, {}
    for category, prompts in dataset(options).categories(options.by_category).items():
        fitting = (p for p in prompts if len(p.token_ids(tokenizer)) <= room)
        chosen = list(itertools.islice(fitting, number))
        if not chosen:
            raise ConfigError(
                f"No prompt of the category {category!r} fits in {room} tokens, which "
                f"max_model_len={config.max_model_len} leaves with --output-len "
                f"{options.output_len}: change one of them, or leave the category out "
                "of the file.",
                parameter="max_model_len",
                value=config.max_model_len,
            )
        # As in other data sets, prompts are repeated if there are too few.
        found[category] = list(itertools.islice(itertools.cycle(chosen), number))
    return found


def _places(
    options: argparse.Namespace, prompts: Mapping[str, Sequence[Prompt]]
) -> list[Place]:
    """Return the places to measure: the smallest batches of all categories first."""
    sizes, temperatures = sweep_of(options)
    number = options.num_prompts or sizes[-1]
    counts = [len(one) for one in prompts.values()]
    firsts = dict(zip(prompts, itertools.accumulate([0, *counts]), strict=False))
    return [
        Place(
            category=category,
            temperature=temperature,
            batch_size=size,
            first_prompt=firsts[category],
            num_batches=max(number // size, 1),
        )
        for temperature in temperatures
        for size in sizes
        for category in prompts
    ]


def _new_result(offline: Offline) -> dict[str, Any]:
    """Return the header of a result."""
    offline.print_label()
    result = offline.new_result("spec")
    result["arguments"] |= _settings(offline.options)
    return result | {"device": offline.device()}


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return what a result records of the flags instead of their own values."""
    sizes, _ = sweep_of(options)
    data = dataset(options)
    path = data.path or (BUNDLED if data.name in FILES else None)
    return {
        # Without a model the flags mean the bundled target.
        "model": engine_args(dict(vars(options))).model,
        "num_prompts": options.num_prompts or sizes[-1],
        "prompts_digest": None if path is None else _digest(path),
    }


def _read_earlier(
    options: argparse.Namespace,
    identities: Sequence[Mapping[str, Any]],
) -> dict[str, Any] | None:
    """Return the result to resume; None if there is none.

    Raises:
        ConfigError: The file is no such result, or was measured with other settings.
    """
    path = options.output_json
    if not options.resume or not path.exists():
        return None
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        entries, theirs = before["methods"], dict(before["arguments"])
        names = {one["name"]: one for one in entries}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--resume needs a result of spec --all-methods, got {path.name}: "
            f"{type(error).__name__}: {error}",
            parameter="--output-json",
            value=str(path),
        ) from error
    ours: dict[str, Any] = recorded_arguments(options) | _settings(options)
    ours = json.loads(json.dumps(ours))  # lists in place of tuples
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in _RESUMABLE and ours.get(name) != theirs.get(name):
            raise ConfigError(
                f"--resume: {path.name} was measured with "
                f"{name}={theirs.get(name)!r}, got {ours.get(name)!r}. Give the same "
                "arguments and prompts, or another --output-json.",
                parameter=name,
                value=ours.get(name),
            )
    for one in identities:
        known = names.get(one["name"], one)
        if any(known.get(key) != value for key, value in one.items()):
            differing = next(key for key in one if known.get(key) != one[key])
            raise ConfigError(
                f"--resume: {path.name} has the method {one['name']!r} with "
                f"{differing}={known.get(differing)!r}, got {one[differing]!r}. Give "
                "the same drafts, or another --output-json.",
                parameter="--all-methods",
                value=one["name"],
            )
    return before


def _new_entry(
    offline: Offline, identity: Mapping[str, Any], device: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a method's entry of a result, without points."""
    speculative, memory = offline.engine.config.speculative, offline.engine.memory
    assert speculative is not None
    sizes, _ = sweep_of(offline.options)
    offline.engine.policy.set_adaptive(False)  # parts have all drafts
    parts = {size: offline.parts(size, (0, speculative.num_levels)) for size in sizes}
    for found in parts.values():
        if found:
            print(f"{identity['name']}: {parts_table(found, device)}", flush=True)
    return {
        **identity,
        "num_levels": speculative.num_levels,
        "num_nodes": speculative.num_nodes,
        "num_side_leaves": speculative.num_side_leaves,
        "speculative_token_tree": speculative.speculative_token_tree,
        "memory_bytes": None if memory is None else memory.draft_bytes,
        "points": [],
        "parts": [one.as_json() for found in parts.values() for one in found],
    }


def _measure(
    offline: Offline,
    places: Sequence[Place],
    points: list[dict[str, Any]],
    save: Callable[[], None],
) -> None:
    """Measure a method at some places; append its points, and save after each."""
    speculative = offline.engine.config.speculative
    assert speculative is not None
    levels = speculative.num_levels
    fixed = [k for k in offline.options.draft_tokens or () if k < levels]
    modes = {PLAIN: (0, False), **{str(k): (k, False) for k in sorted(fixed)}}
    modes |= {SPECULATIVE: (levels, False), CHOSEN: (levels, True)}
    num_batches = sum(place.num_batches for place in places)
    num_runs = len(modes) * num_batches * offline.options.num_iters
    with offline.bench(num_runs) as bench:
        for place in places:
            measured = _measured(offline, bench, place, modes)
            points.append(_point(offline, place, measured))
            save()


def _measured(
    offline: Offline,
    bench: Bench,
    place: Place,
    modes: Mapping[str, tuple[int, bool]],
) -> Measured:
    """Run all modes alternately, batch by batch.

    Args:
        modes: Maximum K of each mode, and whether the engine chooses K.
    """

    def batch(prompts: slice, k: int, *, chooses_k: bool) -> Batch:
        made = offline.batch(k, prompts, temperature=place.temperature)
        return Batch(prompts=made.prompts, params=made.params, chooses_k=chooses_k)

    return Measured.join(
        [
            bench.alternate(
                {
                    name: batch(prompts, k, chooses_k=chooses_k)
                    for name, (k, chooses_k) in modes.items()
                }
            )
            for prompts in place.slices()
        ]
    )


def _point(offline: Offline, place: Place, measured: Measured) -> dict[str, Any]:
    """Return one point of a result."""
    is_brief = offline.options.by_category is not None
    runs = measured.runs
    acceptance = sum((one.acceptance for one in runs[SPECULATIVE]), Acceptance())
    point: dict[str, Any] = {"category": place.category} if place.category else {}
    point |= {
        "temperature": place.temperature,
        "batch_size": place.batch_size,
        "num_discarded_runs": measured.num_discarded,
        PLAIN: _summary(runs[PLAIN], is_brief=is_brief),
        SPECULATIVE: _summary(runs[SPECULATIVE], is_brief=is_brief),
        "decode_speed_up": speed_ups(measured, SPECULATIVE, is_decode=True),
        "tokens_per_round": acceptance.tokens_per_round,
        "by_num_draft_tokens": {},
    }
    for name in runs.keys() - {PLAIN, SPECULATIVE}:
        found = _summary(runs[name], is_brief=True)
        found["decode_speed_up"] = speed_ups(measured, name, is_decode=True)
        if name == CHOSEN:
            point[CHOSEN] = found
        else:
            point["by_num_draft_tokens"][name] = found
    if offline.must_agree(place.temperature):
        point["is_equal"] = all(is_equal(measured, name) for name in runs)
    return _rounded(point) if is_brief else point


def _rounded(value: Any) -> Any:
    """Round all numbers of a point, for a smaller file."""
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _summary(runs: Sequence[Run], *, is_brief: bool) -> dict[str, Any]:
    found = summarize(runs)
    return {key: found[key] for key in _KEPT if key in found} if is_brief else found


def _digest(path: Path) -> str:
    """Return a digest of a model's files."""
    found = hashlib.sha256()
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    for one in files:
        if one.is_file():
            found.update(one.name.encode())
            with one.open("rb") as stream:
                found.update(hashlib.file_digest(stream, "sha256").digest())
    return found.hexdigest()[:16]


def methods_of(options: argparse.Namespace) -> list[Method]:
    """Return all methods for the target of a command line.

    Raises:
        ConfigError: A folder has neither a head nor a draft model.
    """
    args = vars(engine_args(dict(vars(options))))
    given = {
        SPECULATIVE_NAMES[name]: args[name]
        for name in _COUNTS
        if args[name] is not None
    }
    # Lookups need no model, so a number of drafts may be given alone.
    if any(args[name] is not None for name in _SPECULATIVE if name not in _COUNTS):
        given = merge_speculative_arguments(args) or {}
    count = given.get(_COUNT, DEFAULT_DRAFT_TOKENS)
    own = {name: given[name] for name in _OF_MODEL if name in given}
    method = method_of(given.get("method", DRAFT_MODEL))
    is_model = method.has_draft_model and not method.has_one_pass
    lookups = [name for name, row in METHODS.items() if not row.weights]
    names = dict.fromkeys(lookups, {})
    if is_model and own:
        names |= dict.fromkeys((DRAFT_MODEL, *map(with_draft_model, lookups)), own)
    found = [
        Method(
            name=name,
            config={"num_speculative_tokens": count, **more, "method": name},
        )
        for name, more in names.items()
    ]
    folders = list(options.all_methods)
    if not folders and args["model"] == BUNDLED_TARGET:
        folders = list(BUNDLED_HEADS)
    if not is_model and "model" in given:
        folders.insert(0, given["model"])
    found += [_of_folder(name, count) for name in folders]
    names_found = [one.name for one in found]
    for name in names_found:
        if names_found.count(name) > 1:
            allowed = f"folders with different names; several are {name!r}"
            raise wrong_argument(ConfigError, "--all-methods", allowed, folders)
    return found


def _of_folder(name: str, count: int) -> Method:
    """Return the method of a folder: a head, or a draft model of either kind."""
    if name in METHODS and not os.path.exists(name):
        row = METHODS[name]
        hint = (
            "Give the folder with its weights: its config.json names the method."
            if row.has_head or row.is_parallel
            else "Give its draft model with --speculative-model."
            if row.weights
            else "It needs no folder, and is always measured."
        )
        allowed = "folders of heads and draft models, not names of methods"
        raise wrong_argument(ConfigError, "--all-methods", allowed, name, hint)
    folder = model_folder(name, "--all-methods")
    kind = kind_of_head(read_config(folder)[0])
    if kind is not None:  # `read_dummy` reports kinds that are not supported
        max_draft_tokens = read_dummy(folder).max_draft_tokens
        count = count if max_draft_tokens is None else min(count, max_draft_tokens)
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
