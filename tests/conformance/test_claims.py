"""Run the conformance checks of `claims.py` on the proposers of `proposers.py`.

`TABLE` lists the proposers on which a check runs in `make test` and in the long suite,
and the reason for each proposer that it skips. Tests are ordered by proposer, so that a
process compiles each proposer once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from tests.conformance import claims
from tests.conformance.distribution import RULES
from tests.conformance.proposers import PROPOSERS

HEADS = ("eagle", "eagle3", "medusa", "dflash")
HEAD_BRANCHES = ("eagle, leaves", "eagle3, leaves", "medusa, tree", "dflash, tree")
LOOKUPS = ("n-gram", "n-gram + draft model", "suffix", "suffix + draft model")
BRANCHES = (
    *("leaves", "tree", "tree, scanned", "largest tree", "n-gram, tree"),
    *("n-gram + draft model, leaves", "suffix, leaves"),
)
TRIMMED = (
    *("trimmed, scanned", "trimmed, n-gram", "trimmed, tree", "trimmed, leaves"),
    "trimmed, pard",
)
PARD = ("pard, 16 drafts", "pard, leaves", "pard, tree")
QUANTIZED = ("int8 draft", "int4 draft")
GEMMA3 = "draft model, Gemma 3"

# Reasons to skip a check for a proposer.
SAME_PATH = "the scheduler treats it like a proposer that is tested"
NO_MODEL = "has no draft model that could equal the target"
OTHER_MODEL = "even with the target's weights its drafts may differ: it has own tests"
BOTH = "its lookup drafts would be wrong even if its draft model were right"
SUMMED = "side branches round differently: test_trees.py allows near ties"
MAIN_CHAIN = "requests with controls use only the main chain: test_trees.py"
NO_DRAFT_PREFILL = "needs no draft prefill"
IN_LOSSLESS = "the lossless long suite tests it on every path"
ELSEWHERE = "tested in test_parameters.py and test_grammars.py"
SEEDED = "test_seeded.py compares 256 mixes of filters"
NO_ARRAYS = "has no arrays that devices could split"
GREEDY_PROGRAM = "its shared program serves only greedy requests"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A conformance check, and the proposers on which it runs.

    Attributes:
        quick: Proposers tested in `make test`; `slow`: in `make test-all`; `long`: in
            the long suite.
        omitted: Skipped proposers, by reason.
    """

    check: Callable[[str], None]
    quick: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    long: tuple[str, ...] = ()
    omitted: dict[str, tuple[str, ...]] = field(default_factory=dict)


IN_SUITE = pytest.mark.long_suite(name="claims")
SPLIT = ("draft model", "pard", "trimmed", *HEADS, GEMMA3)


def _devices(num_devices: int, num_draft_devices: int, **names: Any) -> Row:
    tested = {name for some in names.values() for name in some}
    same = [name for name in PROPOSERS if name not in (*tested, "n-gram", "suffix")]
    return Row(
        check=partial(
            claims.devices_equal_one,
            num_devices=num_devices,
            num_draft_devices=num_draft_devices,
        ),
        omitted={NO_ARRAYS: ("n-gram", "suffix"), SAME_PATH: tuple(same)},
        **names,
    )


def _distribution(rule: str) -> Row:
    """Return the row of a rule.

    In `make test`, `tests/kernels` and `tests/program` count all rules, and
    `tests/e2e/test_grammars.py` counts the texts of an engine.
    """
    return Row(
        check=partial(claims.positions_follow_target, rule=rule),
        slow=("eagle3",),
        long=(
            "draft model",
            *("pard", "pard, leaves", *QUANTIZED, "trimmed", "eagle", "medusa"),
            *("dflash", *HEAD_BRANCHES, *LOOKUPS, "leaves", "tree", "n-gram, tree"),
        ),
        omitted={
            SAME_PATH: (
                *("pard, 16 drafts", "pard, tree", *TRIMMED, "tree, scanned"),
                *("largest tree", "n-gram + draft model, leaves", "suffix, leaves"),
            ),
            "the expected probabilities are those of a Gemma 2": (GEMMA3,),
        },
    )


TABLE: dict[str, Row] = {
    "texts equal plain decoding": Row(
        check=claims.texts_equal_plain_decoding,
        # Quick tests in tests/e2e compare texts of a Gemma 3 (test_lossless.py) and of
        # suffix lookups (test_lookup.py), and drafts of the others (test_heads.py,
        # test_pard.py and test_trimmed.py).
        quick=("draft model", "eagle3", "dflash", "medusa, tree", "n-gram", "tree"),
        slow=(GEMMA3, "pard", "trimmed, scanned", "eagle", "medusa", "suffix"),
        long=(
            *(*PARD, "trimmed", "trimmed, n-gram", "trimmed, leaves", "trimmed, tree"),
            *("trimmed, pard", *QUANTIZED, *LOOKUPS[1::2], "eagle, leaves"),
            *("eagle3, leaves", "dflash, tree", "leaves", "tree, scanned"),
            "largest tree",
            *("n-gram, tree", "n-gram + draft model, leaves", "suffix, leaves"),
        ),
    ),
    "texts end within rounds": Row(
        check=claims.texts_end_within_rounds,
        quick=("draft model",),
        slow=("n-gram", "tree"),
        long=("pard", "trimmed", *HEADS, *LOOKUPS[1:], "leaves", "n-gram, tree")
        + ("tree, scanned", "largest tree", "n-gram + draft model, leaves")
        + ("suffix, leaves",),
        omitted={
            SAME_PATH: (*PARD, *TRIMMED, *QUANTIZED, *HEAD_BRANCHES),
            GREEDY_PROGRAM: (GEMMA3,),
        },
    ),
    "preemption, caching and aborts change nothing": Row(
        check=claims.preemption_caching_and_aborts_change_nothing,
        quick=("draft model", "eagle3"),
        long=(
            *("pard", "trimmed", "eagle", "medusa", "dflash", "n-gram", "suffix"),
            "tree",
        ),
        omitted={
            IN_LOSSLESS: (
                *(GEMMA3, *QUANTIZED, "n-gram + draft model", "suffix + draft model"),
                *(*BRANCHES[:1], *BRANCHES[2:]),
            ),
            SAME_PATH: (*PARD, *TRIMMED, *HEAD_BRANCHES),
        },
    ),
    "drafting stops in a crowd and resumes": Row(
        check=claims.drafting_stops_and_resumes,
        quick=("draft model",),
        long=("pard", *LOOKUPS),
        omitted={
            SAME_PATH: (*(*PARD, "trimmed", *TRIMMED, *QUANTIZED, *BRANCHES, GEMMA3),),
            NO_DRAFT_PREFILL: (*HEADS, *HEAD_BRANCHES),
        },
    ),
    "correct drafts are all accepted": Row(
        check=claims.correct_drafts_are_all_accepted,
        quick=("draft model", GEMMA3, "tree"),
        long=("leaves", "tree, scanned", "largest tree"),
        omitted={
            NO_MODEL: (
                *(*HEADS, *HEAD_BRANCHES, "n-gram", "suffix", "n-gram, tree"),
                "suffix, leaves",
            ),
            OTHER_MODEL: ("pard", *PARD, "trimmed", *TRIMMED, *QUANTIZED),
            BOTH: (
                *("n-gram + draft model", "suffix + draft model"),
                "n-gram + draft model, leaves",
            ),
        },
    ),
    "any choice of K changes nothing": Row(
        check=claims.any_choice_of_k_changes_nothing,
        quick=("tree",),
        long=("draft model", "pard", "leaves", "tree, scanned")
        + ("n-gram + draft model, leaves",),
        omitted={
            SAME_PATH: (
                *(*PARD, "trimmed", *TRIMMED, *QUANTIZED, "largest tree"),
                *(*HEADS, *HEAD_BRANCHES, *LOOKUPS, "n-gram, tree", "suffix, leaves"),
            ),
            GREEDY_PROGRAM: (GEMMA3,),
        },
    ),
    "controls hold": Row(
        check=claims.controls_hold,
        slow=("pard",),
        long=(*HEADS, "trimmed", "n-gram", "suffix"),
        omitted={
            ELSEWHERE: ("draft model", GEMMA3, *QUANTIZED, *LOOKUPS[1::2]),
            MAIN_CHAIN: (
                *(*BRANCHES, *HEAD_BRANCHES, "pard, leaves", "pard, tree"),
                *("trimmed, tree", "trimmed, leaves"),
            ),
            SAME_PATH: (
                *("pard, 16 drafts", "trimmed, scanned", "trimmed, n-gram"),
                "trimmed, pard",
            ),
        },
    ),
    "forms of rounds change nothing": Row(
        check=claims.forms_of_rounds_change_nothing,
        slow=("tree",),
        long=(*HEADS, "pard", "trimmed", "leaves"),
        omitted={
            "tested in test_several_rounds.py and the lossless suite": (
                "draft model",
                *LOOKUPS,
            ),
            SAME_PATH: (
                *(*PARD, *TRIMMED, *QUANTIZED, *HEAD_BRANCHES, *BRANCHES[2:], GEMMA3),
            ),
        },
    ),
    "bfloat16 texts equal plain decoding": Row(
        check=claims.bfloat16_equals_plain_decoding,
        slow=("medusa",),
        long=("eagle", "eagle3", "dflash", "pard", "trimmed"),
        omitted={
            SEEDED: ("draft model",),
            IN_LOSSLESS: (*LOOKUPS, GEMMA3),
            SUMMED: (*BRANCHES, *HEAD_BRANCHES, *PARD[1:], *TRIMMED[2:4]),
            SAME_PATH: (*QUANTIZED, *TRIMMED[:2], TRIMMED[4], PARD[0]),
        },
    ),
    "two devices with a draft on one equal one": _devices(2, 1, long=("draft model",)),
    "eight devices equal one": _devices(
        8, 8, slow=("eagle3",), long=tuple(one for one in SPLIT if one != "eagle3")
    ),
    "eight devices with a draft on two equal one": _devices(
        8, 2, quick=("dflash",), long=tuple(one for one in SPLIT if one != "dflash")
    ),
    **{f"positions follow the target, {rule}": _distribution(rule) for rule in RULES},
}


def pairs() -> list[Any]:
    """Return the checks and proposers to test, ordered by proposer."""
    return [
        pytest.param(
            *(claim, name),
            marks=marks,
            id=f"{name}: {claim}",
        )
        for name in PROPOSERS
        for claim, row in TABLE.items()
        for names, marks in (
            (row.quick, ()),
            (row.slow, pytest.mark.slow),
            (row.long, IN_SUITE),
        )
        if name in names
    ]


@pytest.mark.parametrize(("claim", "name"), pairs())
def test_proposer_meets_claim(claim, name):
    TABLE[claim].check(name)


@pytest.mark.parametrize("claim", TABLE)
def test_table_has_every_proposer_once(claim):
    row = TABLE[claim]
    omitted = [name for names in row.omitted.values() for name in names]
    assert sorted((*row.quick, *row.slow, *row.long, *omitted)) == sorted(PROPOSERS)
