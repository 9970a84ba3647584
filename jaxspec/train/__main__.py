"""Owns `python -m jaxspec.train`: what is trained, and the command line's flags.

Imports what trains only once the command line is right: jax takes seconds.
"""

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from jaxspec.command_line import CommandParser, run_command
from jaxspec.errors import ConfigError
from jaxspec.exit import end

PROG = "python -m jaxspec.train"


def make_parser(prog: str = PROG) -> CommandParser:
    """The parser of the command line; `method` is what is trained."""
    parser = CommandParser(
        prog=prog,
        description="Train what proposes drafts for a target, on what the target "
        "itself writes, and measure on other text of its how many would be accepted. "
        "Ended and started again with the same arguments, it goes on where it was.",
    )
    methods = parser.add_subparsers(title="methods", metavar="METHOD", dest="method")
    for name, (help_text, add_own) in METHODS.items():
        method = methods.add_parser(name, help=help_text, description=help_text)
        _add_common(method)
        add_own(method.add_argument_group(name))
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("files")
    files.add_argument("--target", required=True, help="the target: a folder or a name")
    files.add_argument(
        "--data",
        required=True,
        metavar="FILE",
        help=".jsonl or .jsonl.xz with a 'text' or 'prompt' a line; of a text in "
        "Gemma's turns, what comes before the first answer is the prompt",
    )
    files.add_argument(
        "--out", required=True, metavar="DIR", help="the folder that is made"
    )
    files.add_argument(
        "--work",
        metavar="DIR",
        help="where text and state are kept (default: DIR.work beside --out)",
    )
    text = parser.add_argument_group("text")
    text.add_argument(
        "--text",
        choices=("written", "given"),
        default="written",
        help="what the target writes to the prompts (default), or the file's own",
    )
    _number(text, "--tokens", 300_000, "tokens that the target writes")
    _number(text, "--length", 256, "tokens of a row: of a prompt and its answer")
    _number(text, "--max-num-seqs", 16, "sequences that are written at a time")
    text.add_argument(
        "--held-out",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="share of the rows that acceptance is measured on (default: %(default)s)",
    )
    text.add_argument(
        "--states",
        choices=("recomputed", "cached"),
        default="recomputed",
        help="the target's hidden states: for every step (default), or once, on disk",
    )
    steps = parser.add_argument_group("steps")
    _number(steps, "--steps", 1000, "how many")
    _number(steps, "--rows", 8, "rows of text in a step")
    steps.add_argument(
        "--learning-rate",
        type=float,
        default=1e-3,
        metavar="RATE",
        help="at its peak; %(default)s, the default, suits some million parameters, "
        "1e-4 a head for the 9B",
    )
    _number(steps, "--warmup-steps", 30, "steps in which the rate rises")
    steps.add_argument("--weight-decay", type=float, default=0.0, metavar="DECAY")
    steps.add_argument(
        "--clip",
        type=float,
        default=1.0,
        metavar="NORM",
        help="longest gradient (default: %(default)s)",
    )
    steps.add_argument(
        "--loss",
        choices=("lk", "kl", "tv", "nla"),
        default="lk",
        help="lk (default): KL that gives way to the share of rejected drafts; or one "
        "of them: kl, tv; nla: minus the log of what is accepted",
    )
    steps.add_argument(
        "--decay",
        type=float,
        default=0.8,
        metavar="WEIGHT",
        help="of a place ahead, beside the one before (default: %(default)s)",
    )
    _number(steps, "--eval-every", 100, "steps between measurements")
    _number(steps, "--save-every", 100, "steps between checkpoints")
    _number(steps, "--seed", 0, "of what is drawn")
    devices = parser.add_argument_group("devices")
    _number(
        devices,
        "--tensor-parallel-size",
        1,
        "devices that share a copy of the models; the others share the rows of a step",
    )
    devices.add_argument(
        "--dtype", default="auto", help="of the target: auto, bfloat16 or float32"
    )


def _number(
    group: argparse._ArgumentGroup, flag: str, default: int | None, help_text: str
) -> None:
    told = "" if default is None else " (default: %(default)s)"
    group.add_argument(
        flag, type=int, default=default, metavar="N", help=f"{help_text}{told}"
    )


def _layers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _add_eagle(group: argparse._ArgumentGroup) -> None:
    _number(group, "--passes", 3, "drafts ahead that are trained")
    _number(group, "--intermediate-size", None, "of the layer (default: the target's)")


def _add_eagle3(group: argparse._ArgumentGroup) -> None:
    _add_eagle(group)
    group.add_argument(
        "--layers",
        type=_layers,
        metavar="A,B,C",
        help="after how many of the target's layers its hidden states are taken "
        "(default: as vLLM, 2, half, all but 3)",
    )
    _number(
        group,
        "--draft-vocab-size",
        None,
        "tokens that the head can propose, the most frequent (default: 32000, or all)",
    )


def _add_medusa(group: argparse._ArgumentGroup) -> None:
    _number(group, "--heads", 3, "places ahead")
    _number(group, "--blocks", 1, "residual blocks of a head")


def _add_draft(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--start", metavar="MODEL", help="a model to begin with; its sizes are kept"
    )
    for name in (
        "hidden-size",
        "intermediate-size",
        "num-hidden-layers",
        "num-attention-heads",
        "num-key-value-heads",
    ):
        _number(group, f"--{name}", None, "of a new model")


def _add_pard(group: argparse._ArgumentGroup) -> None:
    _number(group, "--passes", 5, "drafts that one pass makes")
    _number(
        group,
        "--mask-token",
        None,
        "the token in the places of drafts (default: the target's padding token)",
    )
    _add_draft(group)


METHODS = {
    "eagle": (
        "an EAGLE head: one layer over the target's last hidden state",
        _add_eagle,
    ),
    "eagle3": (
        "an EAGLE-3 head: one layer over three of the target's hidden states",
        _add_eagle3,
    ),
    "medusa": (
        "Medusa heads: a residual network for each place ahead",
        _add_medusa,
    ),
    "pard": (
        "a draft model that makes all drafts in one pass, in the places of masks",
        _add_pard,
    ),
    "draft": (
        "a draft model of the target's family, distilled from it",
        _add_draft,
    ),
}


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run one command line; returns the exit code."""
    parser = make_parser(prog)
    options = parser.parse_args(arguments)
    if options.method is None:
        parser.print_help()
        return 0

    def run() -> None:
        if find_spec("optax") is None:
            raise ConfigError(
                "Training needs optax, of the extra `train`: pip install -e '.[train]'."
            )
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        logging.getLogger("absl").setLevel(logging.WARNING)
        importlib.import_module("jaxspec.train.run").run(options)

    return run_command(f"{prog} {options.method}", run)


if __name__ == "__main__":
    end(main(sys.argv[1:]))
