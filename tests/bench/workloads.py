"""Workloads of the subcommands on a fake device."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxspec.bench import offline as module
from jaxspec.bench.flags import make_parser
from jaxspec.bench.measure import Batch
from jaxspec.bench.offline import Offline
from jaxspec.bench.parts import Parts, tree_of
from jaxspec.config.engine import EngineConfig
from jaxspec.engine.llm_engine import LLMEngine
from tests.support.fake_engines import PROMPT, TEXT, make_fake_engine

DEVICE = {
    "platform": "fake",
    "kind": "fake",
    "count": 1,
    "dtype": "float32",
    "copy_bytes_per_s": 2e9,
    "cost_ratio": 0.25,
}


def flags(command: str, *arguments: Any) -> argparse.Namespace:
    return make_parser("prog").parse_args([command, *map(str, arguments)])


def made_parts(
    engine: LLMEngine, batch: Batch, draft_lengths: list[int]
) -> list[Parts]:
    """Return parts with fixed seconds, without running a program."""
    return [
        Parts(
            num_seqs=len(batch.prompts),
            num_draft_tokens=k,
            num_nodes=tree_of(engine, k).num_nodes,
            draft_s=0.001 * k,
            verify_s=0.004,
            accept_s=0.001,
            num_bytes=5_000_000,
        )
        for k in draft_lengths
    ]


def use_fake_engine(patch: pytest.MonkeyPatch, **changes: Any) -> list[LLMEngine]:
    """Let the subcommands use a fake engine with as many sequences as they request.

    Returns:
        The engines that were opened, a list that grows.
    """
    opened: list[LLMEngine] = []

    def open_fake(
        options: argparse.Namespace,
        *,
        num_prompts: int,
        num_seqs: int | None,
        change: Callable[[EngineConfig], EngineConfig] = lambda config: config,
        prompts: Any = None,
    ) -> Offline:
        sizes: dict[str, Any] = {"max_num_seqs": num_seqs or 3, "num_pages": 512}
        keys = sizes | {"num_draft_tokens": 3} | changes
        engine, _ = make_fake_engine(TEXT, change=change, **keys)
        opened.append(engine)
        return Offline(options=options, engine=engine, prompts=[PROMPT] * num_prompts)

    for module_name in ("whole", "spec", "compare", "methods"):
        patch.setattr(f"jaxspec.bench.{module_name}.open_offline", open_fake)
    patch.setattr(Offline, "device", lambda self: DEVICE)
    patch.setattr(module, "measure_parts", made_parts)
    patch.setattr(LLMEngine, "shutdown", lambda self: None)
    return opened


def line_in(path: Path, printed: str) -> str:
    """Return the line of JSON in the file, which must not have been printed."""
    line = path.read_text(encoding="utf-8")
    assert not [one for one in printed.splitlines() if one.startswith("{")]
    return line


def cell(category: str, chosen: float, fixed: float, **changes: Any) -> dict[str, Any]:
    """Make a point of a result of `spec --all-methods`."""

    def speeds(median: float) -> dict[str, Any]:
        return {"median": median, "least": median - 0.1, "most": median + 0.1}

    point: dict[str, Any] = {
        "category": category,
        "temperature": 0.0,
        "batch_size": 1,
        "plain": {"round_s": {"median": 0.02}},
        "speculative": {
            "round_s": {"median": 0.025},
            "acceptance": {"acceptance_rate_per_position": [0.9, 0.5]},
        },
        "decode_speed_up": speeds(fixed),
        "tokens_per_round": 2.4,
        "by_num_draft_tokens": {
            "1": {"decode_speed_up": speeds(1.1), "round_s": {"median": 0.022}}
        },
        "chosen": {"decode_speed_up": speeds(chosen)},
        "is_equal": True,
    }
    return point | changes
