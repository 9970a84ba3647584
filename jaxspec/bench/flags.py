"""The command line of the benchmarks, with vLLM's names where they exist."""

import argparse
import json
from pathlib import Path
from typing import Any

from jaxspec.bench.data import DATASETS, Dataset
from jaxspec.command_line import CommandParser
from jaxspec.engine.arg_utils import AsyncEngineArgs

MODULES = {
    "latency": "jaxspec.bench.whole",
    "throughput": "jaxspec.bench.whole",
    "serve": "jaxspec.bench.serve",
    "lossless": "jaxspec.bench.lossless",
    "spec": "jaxspec.bench.spec",
}
BATCH_SIZES, TEMPERATURES = (1, 4, 8), (0.0, 0.8)
# Removed flags, and their replacements.
REMOVED = {
    "--plot": "save the result and draw it with `python -m benchmarks.figures` in a "
    "checkout",
    "--append-result": "name several loads in one run, or join the files",
    "--metadata": "the result has all arguments, the machine and the versions",
}


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Make the parser of all subcommands."""
    parser = CommandParser(
        prog=prog,
        description="Measure plain decoding and speculation, alternately in one "
        "process.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(
        title="subcommands", metavar="COMMAND", dest="command"
    )
    _add_latency(_command(commands, "latency", "one batch, from start to end"))
    _add_throughput(
        _command(commands, "throughput", "many prompts, all queued at the start")
    )
    _add_serve(_command(commands, "serve", "requests to any server with OpenAI's API"))
    _add_lossless(
        _command(
            commands,
            "lossless",
            "whether speculation changes the texts of any server with OpenAI's API",
        )
    )
    _add_spec(
        _command(
            commands,
            "spec",
            "test whether speculation is faster on this machine: sweeps K, batch "
            "size and temperature, and prints a summary",
        )
    )
    return parser


class _Removed(argparse.Action):
    """A removed flag: an error that names the replacement."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        flag = self.option_strings[0]
        parser.error(f"{flag} was removed: {REMOVED[flag]}.")


def _command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    is_client = name in ("serve", "lossless")
    model = "" if is_client else " Without a model: the bundled pair."
    description = f"{name}: {text}.{model}"
    parser = commands.add_parser(
        name, help=text, description=description, allow_abbrev=False
    )
    for flag in ("--plot",) if name != "serve" else REMOVED:
        parser.add_argument(flag, action=_Removed, nargs="*", help=argparse.SUPPRESS)
    return parser


def _add_latency(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    group.add_argument("--batch-size", type=int, default=8, help="default: %(default)s")
    _add_repeats(group, num_iters=10)
    _add_offline(parser, output_len=128)


def _add_throughput(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--num-prompts",
        type=int,
        default=100,
        help="run --max-num-seqs at a time (default: %(default)s)",
    )
    _add_repeats(group, num_iters=3)
    _add_offline(parser, output_len=128)


def _add_spec(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    add = group.add_argument
    add(
        "--draft-tokens",
        type=int,
        nargs="+",
        metavar="K",
        help="values of K (default: 1, 2, 3 and 5 below --num-speculative-tokens, and "
        "that number). For --all-methods: fixed K besides the largest and the chosen "
        "one (default: none)",
    )
    add(
        "--forms",
        nargs="+",
        metavar="FORM",
        help="compare shapes of drafts instead of values of K, with an engine for "
        "each: chain, chain=K, leaves=W, best=N or a tree such as '[(0,), (1,), "
        "(0, 0)]'. best=N prints the speculative_token_tree of at most N drafts "
        "that is predicted to be fastest from the measurements of the shapes "
        "before it",
    )
    add(
        "--all-methods",
        nargs="*",
        metavar="FOLDER",
        help="compare all methods instead of values of K, with an engine for each: "
        "n-grams, suffixes, the draft model that the flags name, alone and combined "
        "with these, and the heads and draft models in the given folders (default for "
        "the bundled target: its bundled heads)",
    )
    add(
        "--by-category",
        nargs="?",
        const="category",
        metavar="KEY",
        help="for --all-methods: measure each category of prompts by itself. KEY is "
        "the key of a prompt's line that has its category (default: category). Prompts "
        "that do not fit --max-model-len are left out",
    )
    add(
        "--resume",
        action="store_true",
        help="for --all-methods: keep the cells in --output-json, and measure only the "
        "missing ones; refused if it was measured with other settings. The file is "
        "written after every cell, so a run may be stopped at any time",
    )
    add(
        "--num-prompts",
        type=int,
        help="for --forms and --all-methods: number of prompts (of each category), run "
        "one batch at a time, at least one batch (default: the largest batch size)",
    )
    add(
        "--batch-sizes",
        type=int,
        nargs="+",
        metavar="N",
        default=list(BATCH_SIZES),
        help="default: 1 4 8",
    )
    add(
        "--temperatures",
        type=float,
        nargs="+",
        metavar="T",
        default=list(TEMPERATURES),
        help="default: 0 0.8",
    )
    _add_repeats(group, num_iters=3)
    _add_offline(parser, output_len=128, has_temperature=False)


def _add_repeats(group: argparse._ArgumentGroup, *, num_iters: int) -> None:
    add = group.add_argument
    add(
        "--num-iters",
        type=int,
        default=num_iters,
        help="timed runs per mode (default: %(default)s)",
    )
    add(
        "--num-iters-warmup",
        type=int,
        default=1,
        help="minimum number of untimed runs before them; more run until nothing is "
        "compiled. With 0, none run, and only runs that compile are repeated "
        "(default: %(default)s)",
    )
    add(
        "--parts",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also time the parts of a round, which compiles additional programs",
    )
    _add_json(group)
    add("--output-json", type=Path, metavar="FILE", help="write the JSON to a file")


def _add_json(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--json",
        action="store_true",
        help="print all figures as a line of JSON; tables go to stderr",
    )


def _add_offline(
    parser: argparse.ArgumentParser, *, output_len: int, has_temperature: bool = True
) -> None:
    _add_data(parser, output_len=output_len)
    group = parser.add_argument_group("sampling")
    _add_sampling(group, has_temperature=has_temperature)
    group.add_argument(
        "--disable-detokenize",
        action="store_true",
        help="do not detokenize in timed runs",
    )
    group = parser.add_argument_group("drafts")
    group.add_argument(
        "--forced-acceptance",
        type=float,
        metavar="PROBABILITY",
        help="accept every draft with this probability, from 0 to 1, if those before "
        "it are accepted: for weights whose text is meaningless. All outputs state it",
    )
    AsyncEngineArgs.add_cli_args(parser)


def _add_data(parser: argparse.ArgumentParser, *, output_len: int) -> None:
    group = parser.add_argument_group("prompts")
    add = group.add_argument
    add(
        "--dataset-name",
        choices=DATASETS,
        help="default: the bundled prompts, or custom with --dataset-path. The text of "
        "random prompts, and the acceptance on it, are meaningless",
    )
    add(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help='lines of JSON with "prompt", or with "turns", of which the first is used',
    )
    add(
        *("--input-len", "--random-input-len"),
        type=int,
        default=32,
        help="tokens of random prompts (default: %(default)s)",
    )
    add(
        *("--output-len", "--random-output-len", "--custom-output-len"),
        type=int,
        default=output_len,
        help="tokens to generate (default: %(default)s)",
    )
    sizes = {"prefix-len": 256, "suffix-len": 32, "num-prefixes": 4}
    for name, default in sizes.items():
        add(f"--prefix-repetition-{name}", type=int, default=default)


def _add_sampling(
    group: argparse._ArgumentGroup, *, has_temperature: bool = True
) -> None:
    add = group.add_argument
    if has_temperature:
        add("--temperature", type=float, default=0.0, help="default: 0, greedy")
    add("--top-p", type=float, default=1.0)
    add("--top-k", type=int, default=0)
    add("--min-p", type=float, default=0.0)
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="always generate --output-len tokens (default: yes)",
    )


def _add_serve(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the server")
    add = group.add_argument
    add("--base-url", metavar="URL", help="URL of the server, instead of host and port")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add(
        "--endpoint",
        default="/v1/completions",
        help="/v1/completions (default) or /v1/chat/completions",
    )
    add("--model", help="default: the first model that the server lists")
    add("--api-key", help="default: OPENAI_API_KEY of the environment")
    add("--ready-check-timeout-sec", type=float, default=600.0)
    _add_load(parser.add_argument_group("load"))
    _add_data(parser, output_len=128)
    sampling = parser.add_argument_group("sampling")
    _add_sampling(sampling)
    sampling.add_argument(
        "--extra-body", type=_json, default={}, help="JSON, added to every request"
    )
    _add_saving(parser.add_argument_group("results"))


def _add_lossless(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the servers")
    add = group.add_argument
    add("--base-url", metavar="URL", default="http://127.0.0.1:8000")
    add(
        "--other-base-url",
        metavar="URL",
        help="a server of the same model without speculation (default: the same server "
        "with --other-extra-body)",
    )
    add("--extra-body", type=_json, default={}, help="JSON, added to every request")
    add(
        "--other-extra-body",
        type=_json,
        help="JSON, added to the reference's requests in its place (default for "
        'jaxspec\'s server: {"num_speculative_tokens": 0})',
    )
    add("--model", help="default: the first model that the server lists")
    add("--api-key", help="default: OPENAI_API_KEY of the environment")
    group = parser.add_argument_group("measurement")
    add = group.add_argument
    add("--num-prompts", type=int, default=20, help="default: %(default)s")
    add(
        "--max-concurrency",
        type=int,
        default=8,
        help="requests at once in the cases with several (default: %(default)s)",
    )
    add(
        "--tie-gap",
        type=float,
        default=0.1,
        metavar="NATS",
        help="largest difference of two tokens' logprobs that counts as a near tie "
        "(default: %(default)s)",
    )
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="always generate --output-len tokens (default: yes)",
    )
    _add_json(group)
    add("--output-json", type=Path, metavar="FILE", help="write the JSON to a file")
    add("--seed", type=int, default=0, help="of random prompts")
    _add_data(parser, output_len=64)


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--num-prompts", type=int, default=100, help="default: %(default)s")
    add(
        "--request-rate",
        type=float,
        nargs="+",
        metavar="RPS",
        default=[float("inf")],
        help="requests/s; several are a sweep (default: inf, all at once)",
    )
    add(
        "--max-concurrency",
        type=int,
        nargs="+",
        metavar="N",
        help="maximum concurrent requests; several are a sweep, and one given twice is "
        "measured twice (default: no limit)",
    )
    add(
        "--burstiness",
        type=float,
        default=1.0,
        help="shape of the gamma distribution of the times between requests; 1, the "
        "default, is a Poisson process, less is burstier",
    )
    add(
        "--num-warmups",
        type=int,
        default=0,
        help="number of requests before the measurement",
    )
    add(
        "--compare-plain",
        action=argparse.BooleanOptionalAction,
        help="measure every point also with num_speculative_tokens=0 in the requests, "
        "which jaxspec's server supports (default: if its metrics report drafts)",
    )
    add("--seed", type=int, default=0)


def dataset(options: argparse.Namespace) -> Dataset:
    """Return the data set that the flags name; a file implies "custom"."""
    name = options.dataset_name
    if name is None:
        name = "bundled" if options.dataset_path is None else "custom"
    return Dataset(
        name=name,
        path=options.dataset_path,
        input_len=options.input_len,
        prefix_len=options.prefix_repetition_prefix_len,
        suffix_len=options.prefix_repetition_suffix_len,
        num_prefixes=options.prefix_repetition_num_prefixes,
        seed=options.seed or 0,
    )


def _add_saving(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    _add_json(group)
    add("--percentile-metrics", default="ttft,tpot,itl", help="of ttft,tpot,itl,e2el")
    add(
        "--metric-percentiles",
        default="99",
        help="percentiles to report, such as 50,90,99",
    )
    add(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help="count requests within these limits, such as ttft:200 tpot:50",
    )
    add("--save-result", action="store_true")
    add(
        "--save-detailed",
        action="store_true",
        help="also save the times of every request",
    )
    add("--result-dir", type=Path, default=Path())
    add(
        "--result-filename",
        help="name of the result file (default: made from date and load)",
    )


def _json(text: str) -> Any:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        message = f"it must be JSON, got {text!r}: {error}"
        raise argparse.ArgumentTypeError(message) from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"it must be a JSON object, got {text!r}")
    return found
