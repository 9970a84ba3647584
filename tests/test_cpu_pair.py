"""`make bench`: its prompts, and rows of its table from runs with known times."""

import argparse
import json
import lzma
from pathlib import Path

import pytest

from benchmarks import measure
from jaxspec.bench.acceptance import Acceptance
from jaxspec.bench.measure import Run, Span
from tests.support.fake_engines import make_fake_engine


def run(seconds: float, num_rounds: int, *, token: int = 7, kept: int = 0) -> Run:
    """Return a run of 21 tokens, the first of which is sampled after the prompt.

    Its rounds have two drafts each.
    """
    drafted = Acceptance(
        num_drafts=num_rounds if kept else 0,
        num_draft_tokens=2 * num_rounds if kept else 0,
        num_accepted=kept,
    )
    return Run(
        elapsed_s=seconds + 0.5,
        num_prompt_tokens=4,
        token_ids=[[token] * 21],
        first_token_s=[0.5],
        per_token_s=[seconds / 20],
        inter_token_s=[],
        decode=Span(
            seconds=seconds, num_tokens=20, num_rounds=num_rounds, host_s=0.1 * seconds
        ),
        acceptance=drafted,
    )


def test_row_has_medians_over_prompts_of_medians_over_repeats():
    first = measure.PromptRuns(
        domain="math",
        num_prompt_tokens=4,
        plain=[run(2.0, 20), run(1.0, 20), run(4.0, 20)],
        speculative=[run(1.0, 10, kept=10), run(0.5, 10, kept=10), run(0.25, 5)],
    )
    other = measure.PromptRuns(
        domain="code",
        num_prompt_tokens=4,
        plain=[run(1.0, 20)],
        speculative=[run(1.0, 10, token=8, kept=5)],
    )
    row = measure.summarise([first, other])
    assert (row["num_prompts"], row["num_equal"]) == (2, 1)
    # Tokens per second of the two prompts: 10 and 20 without drafts, 40 and 20 with
    # drafts.
    assert row["plain_tokens_per_s"] == 15
    assert row["speculative_tokens_per_s"] == 30
    assert (row["speed_up"], row["speed_up_range"]) == (2.5, [1.0, 4.0])
    assert row["acceptance_rate"] == 25 / 60
    assert row["mean_acceptance_length"] == 1 + 25 / 30
    assert row["tokens_per_round"] == 80 / 35
    # Rounds took 0.1, 0.05, 0.2 and 0.05 s.
    assert row["plain_round"]["round_s"] == pytest.approx(0.075)
    assert row["plain_round"]["host_share"] == pytest.approx(0.1)
    assert row["plain_first_token_s"] == 0.5
    assert first.as_json()["speculative_tokens_per_s"] == [20, 40, 80]


def test_prompts_are_run_plain_and_with_drafts():
    engine, _ = make_fake_engine(num_draft_tokens=3, max_num_seqs=1)
    options = argparse.Namespace(num_tokens=12, num_speculative_tokens=3, repeats=2)
    (found,) = measure.run_prompts(
        engine, [("math", "+*%,")], options, {"temperature": 0.0}
    )
    assert len(found.plain) == len(found.speculative) == 2
    assert found.is_equal
    assert [len(text) for text in found.plain[0].token_ids] == [12]
    row = measure.summarise([found])
    assert row["tokens_per_round"] > 1
    assert row["plain_round"]["round_s"] > 0
    assert not any(one.acceptance.num_drafts for one in found.plain)


def corpus_of(folder: Path, count: int) -> Path:
    """Write a corpus of `count` numbered conversations per domain; return its path."""
    with lzma.open(folder / "valid.jsonl.xz", "wt", encoding="utf-8") as lines:
        for number in range(count):
            for domain in measure.DOMAINS:
                text = f"{domain} {number}{measure.OPEN_TURN}an answer"
                lines.write(json.dumps({"domain": domain, "text": text}) + "\n")
        lines.write(json.dumps({"domain": "math", "text": "too short"}) + "\n")
    return folder


def test_prompts_are_spread_over_the_corpus(tmp_path):
    chosen = measure.load_prompts(corpus_of(tmp_path, 5), 2)
    assert list(chosen.by_domain) == list(measure.DOMAINS)
    # The step is 2: of five prompts it takes the first, third and fifth, and two of
    # these are used.
    assert chosen.by_domain["math"] == [
        f"math 0{measure.OPEN_TURN}",
        f"math 2{measure.OPEN_TURN}",
    ]
    assert chosen.digest == measure.load_prompts(tmp_path, 2).digest
    assert chosen.digest != measure.load_prompts(tmp_path, 1).digest
    with pytest.raises(SystemExit, match="these are all prompts of.*'math': 5"):
        measure.load_prompts(tmp_path, 6)


def test_folder_without_a_corpus_is_rejected(tmp_path):
    with pytest.raises(
        SystemExit, match=r"--corpus must be a folder with valid\.jsonl"
    ):
        measure.load_prompts(tmp_path, 1)


def test_text_is_cut_at_the_end_of_a_word():
    text = "word " * 200
    prompt = measure.prompt_of(text)
    assert prompt is not None
    assert len(prompt) == 319
    assert text.startswith(prompt + " ")
    assert measure.prompt_of("word " * 100) is None
    assert measure.prompt_of(measure.OPEN_TURN) is None
