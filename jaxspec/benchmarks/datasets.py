"""The prompts of `jaxspec.bench`, with functions of vLLM's `benchmarks.datasets`."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.bench.data import DATASETS, Dataset


@dataclass(frozen=True)
class SampleRequest:
    """One prompt of a benchmark."""

    prompt: str
    multi_modal_data: None = None


def add_dataset_parser(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `get_samples` reads."""
    add = parser.add_argument
    add("--dataset-name", choices=DATASETS, default="bundled")
    add("--dataset-path", type=Path, metavar="FILE", help="prompts, for custom")
    add("--num-prompts", type=int, default=1000)
    add("--seed", type=int, default=0)


def get_samples(args: argparse.Namespace, tokenizer: Any) -> list[SampleRequest]:
    """Return prompts, as texts.

    Args:
        tokenizer: Accepted for vLLM's signature.

    Raises:
        ConfigError: The file cannot be read, or a flag is invalid.
    """
    chosen = Dataset(name=args.dataset_name, path=args.dataset_path, seed=args.seed)
    return [SampleRequest(one.text) for one in chosen.prompts(args.num_prompts)]
