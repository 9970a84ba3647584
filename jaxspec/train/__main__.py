"""Owns `python -m jaxspec.train`: its subcommands (methods) and its flags.

Imports the training modules only after the command line is parsed: importing jax takes
seconds.
"""

import argparse
import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from jaxspec.command_line import CommandParser, run_command
from jaxspec.exit import interrupts_end, run_main
from jaxspec.extras import needs_extra

PROG = "python -m jaxspec.train"


def make_parser(prog: str = PROG) -> CommandParser:
    """Make the command line's parser; its `method` is the kind of proposer."""
    parser = CommandParser(
        prog=prog,
        description="Train a draft model or head for a target, on text that the target "
        "generates, and measure the acceptance rate on held-out text. Run again with "
        "the same arguments to resume an interrupted run.",
    )
    methods = parser.add_subparsers(title="methods", metavar="METHOD", dest="method")
    text = methods.add_parser(TEXT, help=_TEXT_HELP, description=_TEXT_HELP)
    _add_text(text)
    for name, (help_text, add_own) in METHODS.items():
        method = methods.add_parser(name, help=help_text, description=help_text)
        _add_common(method)
        add_own(method.add_argument_group(name))
    return parser


def _add_text(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    lines = ".jsonl or .jsonl.xz with a 'prompt' or 'text' in each line"
    for flag, use in (
        ("--data", "prompts of texts to train on"),
        ("--held-out-data", "prompts of held-out texts, none of them also in --data"),
    ):
        parser.add_argument(flag, required=True, metavar="FILE", help=f"{use}: {lines}")
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="folder for the texts"
    )
    _number(parser, "--tokens", 300_000, "tokens to train on")
    _number(parser, "--held-out-tokens", 15_000, "held-out tokens")
    _add_writing(parser)
    parser.add_argument(
        "--temperatures",
        type=_numbers_of(float),
        default=(0.7, 1.0),
        metavar="LOW,HIGH",
        help="each text has a temperature between these (default: 0.7,1.0)",
    )
    _number(parser, "--seed", 0, "seed of all random numbers")
    _add_devices(parser)


def _add_target(parser: Any) -> None:
    parser.add_argument(
        "--target", required=True, help="the target: a folder or a name"
    )


def _add_writing(group: Any) -> None:
    _number(group, "--length", 256, "tokens of a row: a prompt and its answer")
    _number(group, "--max-num-seqs", 16, "sequences generated at a time")


def _add_devices(group: Any) -> None:
    _number(
        group,
        "--tensor-parallel-size",
        1,
        "devices that share a copy of the models; the others share the rows of a step",
    )
    group.add_argument(
        "--dtype", default="auto", help="type of the target: auto, bfloat16 or float32"
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("files")
    _add_target(files)
    source = files.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--texts",
        metavar="DIR",
        help="folder of texts that `text` wrote; the flags of texts have no effect",
    )
    source.add_argument(
        "--data",
        metavar="FILE",
        help=".jsonl or .jsonl.xz with a 'text' or 'prompt' in each line; the prompt "
        "of a text in Gemma's turns is the part before the first answer",
    )
    files.add_argument("--out", required=True, metavar="DIR", help="folder to create")
    files.add_argument(
        "--work",
        metavar="DIR",
        help="folder for text and state (default: DIR.work next to --out)",
    )
    files.add_argument(
        "--export",
        choices=("safetensors", "specforge", "gguf"),
        default="safetensors",
        help="safetensors (default): a HuggingFace folder, heads in the form of the "
        "library speculators; specforge: an EAGLE-3 head as SGLang reads it; gguf: a "
        "draft model that llama.cpp reads too",
    )
    text = parser.add_argument_group("text")
    text.add_argument(
        "--text",
        choices=("written", "given"),
        default="written",
        help="written: the target continues the prompts (default); given: the file's "
        "own text",
    )
    _number(text, "--tokens", 300_000, "tokens that the target generates")
    _add_writing(text)
    text.add_argument(
        "--held-out",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="share of the rows held out to measure acceptance (default: %(default)s)",
    )
    _number(
        text,
        "--held-out-rows",
        None,
        "with --texts: number of held-out rows to evaluate (default: all)",
    )
    text.add_argument(
        "--states",
        choices=("recomputed", "cached"),
        default="recomputed",
        help="the target's hidden states: recomputed in every step (default), or "
        "cached on disk",
    )
    steps = parser.add_argument_group("steps")
    _number(steps, "--steps", 1000, "number of steps")
    _number(steps, "--rows", 8, "rows of text in a step")
    steps.add_argument(
        "--learning-rate",
        type=float,
        default=1e-3,
        metavar="RATE",
        help="peak learning rate; the default, %(default)s, suits a few million "
        "parameters, 1e-4 a head for the 9B",
    )
    _number(steps, "--warmup-steps", 30, "steps in which the learning rate rises")
    steps.add_argument("--weight-decay", type=float, default=0.0, metavar="DECAY")
    steps.add_argument(
        "--clip",
        type=float,
        default=1.0,
        metavar="NORM",
        help="clip gradients to this norm (default: %(default)s)",
    )
    steps.add_argument(
        "--loss",
        choices=("lk", "kl", "tv", "nla"),
        default="lk",
        help="lk (default): KL, shifting to the rejection probability as acceptance "
        "rises; kl or tv: one of the two alone; nla: minus the log of the acceptance "
        "probability",
    )
    steps.add_argument(
        "--decay",
        type=float,
        default=0.8,
        metavar="WEIGHT",
        help="weight of each position's loss relative to the position before it "
        "(default: %(default)s)",
    )
    _number(steps, "--eval-every", 100, "steps between evaluations")
    _number(steps, "--save-every", 100, "steps between checkpoints")
    _number(steps, "--seed", 0, "seed of all random numbers")
    _add_devices(parser.add_argument_group("devices"))


def _number(group: Any, flag: str, default: int | None, help_text: str) -> None:
    suffix = "" if default is None else " (default: %(default)s)"
    group.add_argument(
        flag, type=int, default=default, metavar="N", help=f"{help_text}{suffix}"
    )


def _numbers_of(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return a parser of numbers that commas separate."""

    def numbers(text: str) -> tuple[Any, ...]:
        return tuple(kind(part) for part in text.split(","))

    return numbers


def _add_eagle(group: argparse._ArgumentGroup) -> None:
    _number(group, "--passes", 3, "number of consecutive drafts that each step trains")
    _number(
        group,
        "--intermediate-size",
        None,
        "intermediate size of the layer (default: the target's)",
    )


def _add_eagle3(group: argparse._ArgumentGroup) -> None:
    _add_eagle(group)
    _add_target_layers(group)
    _number(
        group,
        "--draft-vocab-size",
        None,
        "number of tokens that the head can propose, the most frequent ones (default: "
        "32000, or all)",
    )


def _add_medusa(group: argparse._ArgumentGroup) -> None:
    _number(group, "--heads", 3, "number of heads, one per position ahead")
    _number(group, "--blocks", 1, "residual blocks of a head")


def _add_dflash(group: argparse._ArgumentGroup) -> None:
    _number(group, "--block-size", 8, "tokens of a block: one more than drafts")
    _number(group, "--num-hidden-layers", 2, "number of the drafter's layers")
    _number(
        group,
        "--intermediate-size",
        None,
        "intermediate size of the layers (default: the target's)",
    )
    _add_target_layers(group)
    _number(
        group,
        "--draft-vocab-size",
        None,
        "number of tokens that the drafter can propose, the most frequent ones "
        "(default: all, with the target's output matrix)",
    )
    _add_mask_token(group)


def _add_target_layers(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--layers",
        type=_numbers_of(int),
        metavar="A,B,C",
        help="target layers whose output the head reads (default, as in vLLM: 2, "
        "half of all layers, and all layers but 3)",
    )


def _add_mask_token(group: argparse._ArgumentGroup) -> None:
    _number(
        group,
        "--mask-token",
        None,
        "token in the positions of drafts (default: the target's padding token)",
    )


def _add_draft(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--start",
        metavar="MODEL",
        help="model to start from, which also sets the sizes",
    )
    for name in (
        "hidden-size",
        "intermediate-size",
        "num-hidden-layers",
        "num-attention-heads",
        "num-key-value-heads",
    ):
        _number(group, f"--{name}", None, f"{name.replace('-', ' ')} of a new model")
    group.add_argument(
        "--keep-layers",
        type=_numbers_of(int),
        metavar="A,B,C",
        help="start with these layers of the target, counted from 0, and its embedding "
        "and output matrix, which are not trained",
    )
    _number(
        group,
        "--draft-vocab-size",
        None,
        "with --keep-layers: number of tokens that the draft can propose, the most "
        "frequent ones (default: all)",
    )


def _add_pard(group: argparse._ArgumentGroup) -> None:
    _number(group, "--passes", 5, "drafts that one pass proposes")
    _add_mask_token(group)
    _add_draft(group)


# The command that writes texts for all methods.
TEXT = "text"
_TEXT_HELP = "texts for training, which the target writes"
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
        "Medusa heads: a residual network for each position ahead",
        _add_medusa,
    ),
    "dflash": (
        "a DFlash drafter: layers that fill in a block of masks in one pass",
        _add_dflash,
    ),
    "pard": (
        "a draft model that proposes all drafts in one pass over mask tokens",
        _add_pard,
    ),
    "draft": (
        "a draft model of the target's family, distilled from it",
        _add_draft,
    ),
}


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run one command line; return the exit code."""
    parser = make_parser(prog)
    options = parser.parse_args(arguments)
    if options.method is None:
        parser.print_help()
        return 0

    def run() -> None:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        logging.getLogger("absl").setLevel(logging.WARNING)
        if options.method == TEXT:
            with interrupts_end():
                texts = importlib.import_module("jaxspec.train.texts")
            texts.write_texts(options)
            return
        with interrupts_end(), needs_extra("train", "Training"):
            training = importlib.import_module("jaxspec.train.run")
        training.run(options)

    return run_command(f"{prog} {options.method}", run)


if __name__ == "__main__":
    run_main(main)
