"""Prompts of benchmarks come from a corpus, or from a list in this repository."""

import json
import lzma
from pathlib import Path

import pytest

from benchmarks.measure import DOMAINS, OPEN_TURN, load_prompts, prompt_of


def corpus_of(folder: Path, count: int) -> Path:
    """Write a corpus of `count` numbered conversations per domain; return its path."""
    with lzma.open(folder / "valid.jsonl.xz", "wt", encoding="utf-8") as lines:
        for number in range(count):
            for domain in DOMAINS:
                text = f"{domain} {number}{OPEN_TURN}an answer"
                lines.write(json.dumps({"domain": domain, "text": text}) + "\n")
        lines.write(json.dumps({"domain": "math", "text": "too short"}) + "\n")
    return folder


def test_prompts_are_spread_over_the_corpus(tmp_path):
    chosen = load_prompts(corpus_of(tmp_path, 5), 2)
    assert list(chosen.by_domain) == list(DOMAINS)
    # The step is 2: of five prompts it takes the first, third and fifth, and two of
    # these are used.
    assert chosen.by_domain["math"] == [f"math 0{OPEN_TURN}", f"math 2{OPEN_TURN}"]
    assert chosen.digest == load_prompts(tmp_path, 2).digest
    assert chosen.digest != load_prompts(tmp_path, 1).digest
    with pytest.raises(SystemExit, match="these are all prompts of.*'math': 5"):
        load_prompts(tmp_path, 6)


def test_folder_without_a_corpus_is_rejected(tmp_path):
    with pytest.raises(
        SystemExit, match=r"--corpus must be a folder with valid\.jsonl"
    ):
        load_prompts(tmp_path, 1)


def test_text_is_cut_at_the_end_of_a_word():
    text = "word " * 200
    prompt = prompt_of(text)
    assert prompt is not None
    assert len(prompt) == 319
    assert text.startswith(prompt + " ")
    assert prompt_of("word " * 100) is None
    assert prompt_of(OPEN_TURN) is None
