"""Run a small part of `lossless.py`: every path of the engine gives the plain text."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxspec_kernels import native
from tests.e2e.lossless import (
    LARGE,
    PATHS,
    PROPOSERS,
    RESULTS,
    SHAPED,
    SHORT,
    Cut,
    Play,
    play,
    resumed,
    table,
)
from tests.support import pair

README = Path(__file__).parents[2] / "benchmarks" / "README.md"

# Each `Cut` names a part of `lossless.py`. The suffix part has rounds without drafts,
# with few and with many, on all paths.
SUFFIX = replace(SHORT, num_prompts=32, proposers=("suffix",), drafts=(16,))
LEAVES = replace(SHORT, proposers=("draft_model, leaves",))
TREES = replace(SHORT, proposers=("draft_model, tree",))
LONG = Cut(
    num_prompts=100,
    num_tokens=64,
    drafts=(2, 5),
    batches=(1, 8),
    alone=16,
    is_optimized=False,
    has_local_pages=True,
)
# The operations in C++ are replaced by XLA's, as on machines without a C++ compiler.
XLA = replace(SHORT, num_prompts=12, num_tokens=24, proposers=("ngram",))
# These trees of drafts span several pages and cross the border of windows.
LARGEST = replace(LONG, proposers=tuple(LARGE), drafts=(8,))
SHAPES = replace(LONG, proposers=tuple(SHAPED), drafts=(3,))
# bfloat16 logits have many near ties, so programs are compiled with users' options:
# other options would round differently.
ROUNDED = replace(LONG, dtype="bfloat16", is_optimized=True)
# Every proposer on a Gemma 3 pair. It has four times as many layers, so this part has
# fewer prompts, and each engine compiles one program.
GEMMA3_SHORT = replace(SHORT, family=pair.GEMMA3, num_prompts=16, num_tokens=16)
GEMMA3 = replace(
    SHORT, family=pair.GEMMA3, num_prompts=32, num_tokens=48, proposers=tuple(PROPOSERS)
)
GEMMA3_SHAPES = replace(GEMMA3, proposers=tuple(SHAPED))
GEMMA3_LARGEST = replace(GEMMA3, proposers=tuple(LARGE), drafts=(8,))
GEMMA3_ROUNDED = replace(GEMMA3, dtype="bfloat16", is_optimized=True)
# Layers with a sliding window also keep all tokens.
ALL_KEPT = dict(has_local_pages=False)
SUITE = pytest.mark.long_suite(name="lossless")


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(SHORT, id="short", marks=SUITE),
        pytest.param(SUFFIX, id="suffix", marks=SUITE),
        pytest.param(LEAVES, id="leaves", marks=SUITE),
        pytest.param(TREES, id="trees", marks=pytest.mark.slow),
        pytest.param(SHAPES, id="shapes", marks=SUITE),
        pytest.param(LARGEST, id="largest", marks=SUITE),
        pytest.param(LONG, id="long", marks=SUITE),
        pytest.param(ROUNDED, id="bfloat16", marks=SUITE),
        pytest.param(GEMMA3_SHORT, id="gemma3, short"),
        pytest.param(GEMMA3, id="gemma3", marks=SUITE),
        pytest.param(GEMMA3_SHAPES, id="gemma3, shapes", marks=SUITE),
        pytest.param(GEMMA3_LARGEST, id="gemma3, largest", marks=SUITE),
        pytest.param(GEMMA3_ROUNDED, id="gemma3, bfloat16", marks=SUITE),
        pytest.param(replace(SHORT, **ALL_KEPT), id="all kept", marks=SUITE),
        pytest.param(replace(TREES, **ALL_KEPT), id="trees, all kept", marks=SUITE),
        pytest.param(
            replace(GEMMA3_SHORT, **ALL_KEPT), id="gemma3, short, all kept", marks=SUITE
        ),
        pytest.param(replace(GEMMA3, **ALL_KEPT), id="gemma3, all kept", marks=SUITE),
    ],
)
def test_every_path_equals_plain_decoding(cut):
    check(cut)


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(XLA, id="short"),
        pytest.param(LONG, id="long", marks=SUITE),
    ],
)
def test_every_path_without_operations_in_c(cut, monkeypatch):
    monkeypatch.setenv(native.VARIABLE, native.OFF)
    check(cut)


def test_every_recorded_text_is_equal_and_documented():
    record = json.loads(RESULTS.read_text(encoding="utf-8"))
    plays = [Play(**one) for one in record["plays"]]
    assert len({one.played for one in plays}) == len(plays)
    assert {one.proposer for one in plays} == set(record["cut"]["proposers"])
    for one in plays:
        assert one.num_equal == one.num_prompts > 0, one
    assert record["num_texts"] == sum(one.num_prompts for one in plays)
    assert table(plays) in README.read_text(encoding="utf-8")


def test_record_resumes_only_with_other_proposers():
    before = Cut(proposers=("ngram",), alone=10)
    more = Cut(num_prompts=20, proposers=("draft_model, int8",), alone=4)
    both = replace(before, proposers=("ngram", "draft_model, int8"))
    assert resumed(more, before) == both
    for change in ({"dtype": "bfloat16"}, {"num_tokens": 64}, {"drafts": (3,)}):
        with pytest.raises(AssertionError, match="another cut"):
            resumed(replace(more, **change), before)


def check(cut: Cut) -> None:
    plays = list(play(cut))
    assert {one.path for one in plays} == set(PATHS)
    for one in plays:
        assert one.num_prompts > 0.7 * min(cut.num_prompts, cut.alone)
        assert one.num_equal == one.num_prompts, one
        # A Gemma 3 whose local layers keep their window hardly needs more pages.
        is_large = cut.has_local_pages and cut.family == pair.GEMMA3
        if one.path != "preempted" or not is_large:
            assert (one.num_preemptions > 0) == (one.path == "preempted"), one
        assert (one.num_cached_tokens > 0) == (one.path == "prefix"), one
        assert 0 < one.acceptance_rate < 1, one
