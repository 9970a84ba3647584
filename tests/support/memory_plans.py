"""Plan the memory of a device from given sizes."""

import dataclasses
from typing import Any

from jaxspec.config.engine import GivenSizes
from jaxspec.engine.memory.plan import (
    MemoryFacts,
    MemoryPlan,
    ModelBytes,
    ProgramFacts,
    plan_memory,
)

# Gemma 2 in bfloat16: bytes of the weights, and of a page of 16 tokens.
TARGET_9B = ModelBytes(weight_bytes=18_483_411_968, page_bytes=16 * 344_064)


DRAFT_2B = ModelBytes(weight_bytes=5_228_683_776, page_bytes=16 * 106_496)


PROGRAMS = ProgramFacts(
    num_levels=5,
    vocab_size=256_000,
    draft_vocab_size=256_000,
    max_model_len=8192,
    # Temporaries of a row: 10 bytes x feed-forward width 14,336, and 16 bytes x hidden
    # size 3,584.
    token_bytes=200_704,
    fixed_bytes=256 * 2**20,
)


# Programs without drafts have one row of logits per sequence, and no draft
# distributions.
WITHOUT = dataclasses.replace(PROGRAMS, num_levels=0, draft_vocab_size=0)


def facts(**changes: Any) -> MemoryFacts:
    """Return the facts of 9B with a 2B draft on a device of 80 GB."""
    values: dict[str, Any] = dict(
        device="GPU",
        platform="gpu",
        limit_bytes=80 * 10**9,
        target=TARGET_9B,
        draft=DRAFT_2B,
        programs=PROGRAMS,
        programs_without=WITHOUT,
        kv_dtype="bfloat16",
        page_size=16,
        max_model_len=8192,
    )
    return MemoryFacts(**(values | changes))


def make_plan(given: dict[str, Any] | None = None, **changes: Any) -> MemoryPlan:
    return plan_memory(facts(**changes), GivenSizes(**(given or {})))
