"""What a server's programs cost to compile at full size, in both forms.

    PYTHONPATH=.:kernels:checkpoints:.venv/aot python -m benchmarks.compile_costs

For TPUs and GPUs that are not here: the programs that a server begins with, and those
of rounds of its most sequences, of the sizes that its memory plan gives it, each with
all layers one by one and, on TPUs, with layers scanned (`scan_layers`). CPU-s of the
process, which other work changes less than seconds; operations, arguments and
temporaries. Nothing runs: no figure is a speed of a round. Writes
benchmarks/results/compile-costs.json after every program and prints the table. Programs
that have a row are left out, unless `--again` is given; every row has its commit.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from tqdm.auto import tqdm

from benchmarks.program_costs import num_operations
from jaxspec.bench.report import commit, record
from jaxspec.config import EngineConfig
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.described import (
    check_device,
    describe,
    describe_mesh,
    named_devices,
    named_mesh,
)
from jaxspec.engine.device_memory import fit
from jaxspec.engine.runner import options_of
from jaxspec.engine.scheduling.shapes import GREEDY, SAMPLED, EveryProgram, Shapes
from jaxspec.engine.speculation.policy import SpeculationPolicy
from jaxspec.program.plan import TILE, StepShape
from jaxspec.program.step import lower_step
from jaxspec_checkpoints.gemma.published import published_config

RESULT = Path(__file__).with_name("results") / "compile-costs.json"
NUM_DRAFT_TOKENS = 5
# Devices, target and draft: in the order of what they cost to compile.
SERVERS: tuple[tuple[str, str, str | None], ...] = (
    ("v6e-1", "2b", None),
    ("v5e-8", "2b", None),
    ("h100", "2b", None),
    ("h100", "9b", "2b"),
    ("h100", "27b", "2b"),
    ("v6e-1", "9b", "2b"),
    ("v5e-8", "9b", "2b"),
    ("v5e-8", "27b", "2b"),
)
# An H100 runs the machine code for an H200, and differs in its memory.
COMPILED_AS = {"h100": "h200"}
# By their place among those of a server: what it begins with, and rounds without
# prompts of its most sequences: sampled with drafts (greedy where there are none),
# greedy with drafts, greedy without.
PROGRAMS = [1, 2, 7, 14, 17]
FORMS = {"one by one": False, "scanned": True}
# What jax says of a text that it cannot read.
UNREADABLE = "async-update instruction"
# What tells a row from the others.
KEY = ("devices", "target", "draft", "program", "scan_layers")


def engine_config(
    target: str,
    draft: str | None = None,
    *,
    num_layers: int | None = None,
    **given: Any,
) -> EngineConfig:
    """The configuration of an engine of published sizes.

    Args:
        num_layers: Of both models, where fewer are enough.
        given: Engine arguments.
    """
    with tempfile.TemporaryDirectory() as root:

        def folder(name: str, size: str) -> str:
            path = Path(root) / name
            path.mkdir()
            config = published_config(size)
            if num_layers is not None:
                config["num_hidden_layers"] = num_layers
            (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
            return str(path)

        given["model"] = folder("target", target)
        if draft is not None:
            given["speculative_model"] = folder("draft", draft)
            given.setdefault("num_speculative_tokens", NUM_DRAFT_TOKENS)
        return EngineArgs(load_format="dummy", **given).create_engine_config()


def server_config(
    devices: str, target: str, draft: str | None, *, scan_layers: bool
) -> EngineConfig:
    """What a server of these models has on these devices when nothing else is said."""
    count = len(named_devices(devices))
    config = engine_config(
        target, draft, scan_layers=scan_layers, tensor_parallel_size=count
    )
    return fit(config, named_mesh(devices, config), device=devices)[0]


class _Made(EveryProgram):
    """Has only some programs."""

    def __init__(self, there: Iterable[StepShape]):
        self._there = set(there)

    def __contains__(self, shape: StepShape) -> bool:
        return shape in self._there


def num_before(config: EngineConfig, *, has_drafts: bool) -> int:
    """Programs that a server compiles before it answers plain requests.

    Args:
        has_drafts: Before its rounds have drafts.
    """
    controller = SpeculationPolicy(config.speculative)
    every = Shapes(config, controller).all()
    drafts = controller.ladder[-1] if has_drafts else 0
    for count in range(1, len(every) + 1):
        shapes = Shapes(config, controller, _Made(every[:count]))
        is_served = all(
            shapes.find(1, 0, TILE, form) and shapes.find(1, drafts, 0, form)
            for form in (GREEDY, SAMPLED)
        )
        if is_served and (not drafts or shapes.can_catch_up):
            return count
    raise AssertionError("no programs answer a request")


def programs(config: EngineConfig) -> list[StepShape]:
    """All that a server may compile, in the order in which it does."""
    return Shapes(config, SpeculationPolicy(config.speculative)).all(with_late=True)


def costs_of(
    lower: Callable[[], jax.stages.Lowered],
    options: dict[str, str | bool] | None = None,
) -> dict[str, Any]:
    """Lower and compile a program; what that cost, and what came of it.

    Bytes are those of one device, `hbm_bytes` all of them together; `peak_rss_bytes`
    is of the process so far. `compiled_ops` is None where jax cannot read the text.
    """
    start, start_cpu = time.monotonic(), _cpu_s()
    lowered = lower()
    lower_s, lower_cpu_s = time.monotonic() - start, _cpu_s() - start_cpu
    start, start_cpu = time.monotonic(), _cpu_s()
    compiled: Any = lowered.compile(options)
    compile_s, compile_cpu_s = time.monotonic() - start, _cpu_s() - start_cpu
    memory, text = compiled.memory_analysis(), text_of(compiled)
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    used += memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "lower_cpu_s": round(lower_cpu_s, 1),
        "lower_s": round(lower_s, 1),
        "compile_cpu_s": round(compile_cpu_s, 1),
        "compile_s": round(compile_s, 1),
        "lowered_ops": num_operations(lowered.as_text()),
        "compiled_ops": None if text is None else num_operations(text),
        "num_arguments": len(jax.tree.leaves(lowered.args_info)),
        "argument_bytes": memory.argument_size_in_bytes,
        "donated_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "hbm_bytes": used + memory.generated_code_size_in_bytes,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def text_of(compiled: Any) -> str | None:
    """The program that a compiler has made; None where jax cannot read it back.

    jax 0.10.2 refuses what libtpu 0.0.52 makes of large batches for a v6e.
    """
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        if UNREADABLE not in str(error):
            raise
        return None


def _cpu_s() -> float:
    """Of this process and of the assemblers that it started."""
    of = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + of.ru_utime + of.ru_stime


def measure(
    devices: str, target: str, draft: str | None, config: EngineConfig, shape: StepShape
) -> dict[str, Any]:
    """One of a server's programs."""
    mesh = describe_mesh(COMPILED_AS.get(devices, devices), config)
    program, forms = describe(config, mesh)
    found = costs_of(
        lambda: lower_step(program, shape, forms), options_of(config, mesh)
    )
    has_drafts = draft is not None
    return {
        "devices": devices,
        "target": target,
        "draft": draft,
        "program": shape.name,
        "scan_layers": config.model_config.scan_layers,
        "num_layers": config.model_config.num_layers,
        "num_pages": config.num_pages,
        "programs_before_answer": num_before(config, has_drafts=False),
        "programs_before_drafts": (
            num_before(config, has_drafts=True) if has_drafts else None
        ),
        **found,
        **commit(),
    }


def merged(rows: list[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with one that is new, in its old place if there was one."""
    key = [row[name] for name in KEY]
    there = [[one[name] for name in KEY] for one in rows]
    if key not in there:
        return [*rows, row]
    return [row if one == key else old for one, old in zip(there, rows, strict=True)]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown: a program a line, both forms in every cell.

    Of a program that was compiled in one form alone, the other is "-".
    """
    lines = [
        "| devices | models | program | CPU-s to lower + compile | operations given | "
        "operations made | arguments | temporaries, MB | code, MB | programs before an "
        "answer, before drafts |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    programs = dict.fromkeys(
        tuple(row[name] for name in KEY if name != "scan_layers") for row in rows
    )
    for program in programs:
        both = {
            row["scan_layers"]: row
            for row in rows
            if tuple(row[name] for name in KEY if name != "scan_layers") == program
        }
        devices, target, draft, name = program

        def cell(tell: Callable[[dict[str, Any]], str], both: Any = both) -> str:
            told = (tell(both[form]) if form in both else "-" for form in (False, True))
            return ", ".join(told)

        any_form = next(iter(both.values()))
        before = any_form["programs_before_answer"], any_form["programs_before_drafts"]
        cells = [
            devices,
            target if draft is None else f"{target} with {draft}",
            name,
            cell(lambda row: f"{row['lower_cpu_s']:.0f}+{row['compile_cpu_s']:.0f}"),
            cell(lambda row: f"{row['lowered_ops']:,}"),
            cell(lambda row: _counted(row["compiled_ops"])),
            cell(lambda row: f"{row['num_arguments']}"),
            cell(lambda row: f"{row['temp_bytes'] / 1e6:.0f}"),
            cell(lambda row: f"{row['code_bytes'] / 1e6:.0f}"),
            ", ".join("-" if one is None else str(one) for one in before),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _counted(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Devices and models as they are compiled, whichever of them were first."""
    servers = [list(server) for server in SERVERS]
    return sorted(rows, key=lambda row: servers.index([row[name] for name in KEY[:3]]))


def main() -> None:
    parser = argparse.ArgumentParser(description="What programs cost at size.")
    names = sorted({devices for devices, _, _ in SERVERS})
    parser.add_argument("--devices", nargs="+", choices=names, default=names)
    sizes = sorted({target for _, target, _ in SERVERS})
    parser.add_argument("--targets", nargs="+", choices=sizes, default=sizes)
    parser.add_argument("--forms", nargs="+", choices=[*FORMS], default=[*FORMS])
    parser.add_argument("--programs", nargs="+", type=int, default=PROGRAMS)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--again", action="store_true", help="also those with a row")
    options = parser.parse_args()
    for name in map(str, options.devices):
        check_device(COMPILED_AS.get(name, name))
    jax.config.update("jax_platforms", "cpu")
    # What an earlier run compiled would look free.
    jax.config.update("jax_enable_compilation_cache", False)
    rows: list[dict[str, Any]] = []
    if options.out.exists():
        rows = json.loads(options.out.read_text(encoding="utf-8"))["rows"]
    wanted: list[Any] = [
        (*server, form, number - 1)
        for number in options.programs
        for server in SERVERS
        if server[0] in options.devices and server[1] in options.targets
        for form in options.forms
        # XLA:GPU copies each layer's weights in such a loop, and is slow.
        if not (FORMS[form] and server[0] in COMPILED_AS)
    ]
    for devices, target, draft, form, number in tqdm(wanted, unit="program"):
        scan = FORMS[form]
        config = server_config(devices, target, draft, scan_layers=scan)
        shapes = programs(config)
        if number >= len(shapes):
            continue
        key = [devices, target, draft, shapes[number].name, scan]
        if not options.again and key in [[row[name] for name in KEY] for row in rows]:
            continue
        row = measure(devices, target, draft, config, shapes[number])
        rows = in_order(merged(rows, row))
        found = {"libtpu": metadata.version("libtpu"), "rows": rows}
        record(found, options.out, command="python -m benchmarks.compile_costs")
    print(table(rows))


if __name__ == "__main__":
    main()
