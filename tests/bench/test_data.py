"""Prompts of benchmarks: files and their errors, and random prompts."""

import json
from typing import Any

import pytest

from jaxspec.bench.data import BUNDLED, WORDS, Dataset, Prompt, read_prompts
from jaxspec.errors import ConfigError
from tests.support.serving import TurnsTokenizer

NUMBERS = {word: number for number, word in enumerate(WORDS)}


class WordTokenizer(TurnsTokenizer):
    """A tokenizer with one token per word."""

    def encode(self, text: str, *_: object, **__: object) -> list[int]:
        return [NUMBERS[word] for word in text.split()]


def lines_in(tmp_path, *entries):
    path = tmp_path / "prompts.jsonl"
    texts = [one if isinstance(one, str) else json.dumps(one) for one in entries]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def test_reads_texts_and_conversations(tmp_path):
    path = lines_in(
        tmp_path,
        {"prompt": "once", "domain": "stories"},
        "",
        {"id": "x", "category": "code", "turns": ["write", "again"], "extra": 1},
    )
    once, write = Dataset(name="custom", path=path).prompts(2)
    assert (once.text, once.is_turn, once.category) == ("once", False, "stories")
    assert (write.text, write.is_turn, write.category) == ("write", True, "code")
    again = Dataset(name="custom", path=path).prompts(5)
    assert [prompt.text for prompt in again] == "once write once write once".split()


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{", "Line 2 of prompts.jsonl must be a line of JSON"),
        ("[1]", r"got \[1\]"),
        ({"turns": []}, "Line 2"),
        ({"turns": [1]}, "Line 2"),
        ({"prompt": ""}, "Line 2"),
        ({"text": "x"}, "Line 2"),
    ],
)
def test_error_names_invalid_line(entry, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        read_prompts(lines_in(tmp_path, {"prompt": "x"}, entry))


def test_text_may_contain_line_separators(tmp_path):
    path = tmp_path / "prompts.jsonl"
    texts = [f"one{end}two" for end in ("\x85", "\u2028", "\u2029", "\r\n", "\v")]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    path.write_text("\r\n".join(lines), encoding="utf-8", newline="")
    assert [prompt.text for prompt in read_prompts(path)] == texts
    with pytest.raises(ConfigError, match="at least one prompt"):
        read_prompts(lines_in(tmp_path, "", ""))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": "sharegpt"}, "--dataset-name must be one of bundled"),
        ({"name": "custom"}, "--dataset-path must be a file"),
        ({"name": "random", "path": BUNDLED}, "if and only if"),
        ({"input_len": 0}, "--input-len must be"),
        ({"num_prefixes": 0}, "--prefix-repetition-num-prefixes must be"),
    ],
)
def test_rejects_invalid_arguments(arguments, said):
    with pytest.raises(ConfigError, match=said):
        Dataset(**arguments)


def test_random_prompts_have_length_and_seed():
    tokenizer = WordTokenizer(len(WORDS))
    found = Dataset(name="random", input_len=7, seed=1).prompts(3)
    assert [len(prompt.token_ids(tokenizer)) for prompt in found] == [7, 7, 7]
    assert len({prompt.text for prompt in found}) == 3
    assert Dataset(name="random", input_len=7, seed=1).prompts(3) == found
    assert Dataset(name="random", input_len=7, seed=2).prompts(3) != found
    # A random prompt is truncated if its words take several tokens each.
    assert len(Prompt(text="people", num_tokens=2).token_ids(TurnsTokenizer(16))) == 2


def test_prefixes_are_shared():
    tokenizer = WordTokenizer(len(WORDS))
    sizes: Any = dict(prefix_len=20, suffix_len=3, num_prefixes=2)
    dataset = Dataset(name="prefix_repetition", **sizes)
    found = [prompt.token_ids(tokenizer) for prompt in dataset.prompts(4)]
    assert [len(tokens) for tokens in found] == [23] * 4
    assert found[0][:20] == found[2][:20] != found[1][:20] == found[3][:20]
    assert len({tuple(tokens[20:]) for tokens in found}) == 4


def test_turn_is_rendered_by_tokenizer():
    found = Dataset().prompts(8)
    assert len({prompt.text for prompt in found}) == 8
    assert {prompt.is_turn for prompt in found} == {True, False}
    tokenizer, said = TurnsTokenizer(16), []
    tokenizer.has_turns = True
    tokenizer.write_chat = lambda messages, **_: (said.append(messages), ("", [5]))[1]
    assert Prompt(text="hi", is_turn=True).token_ids(tokenizer) == [5]
    assert said == [[{"role": "user", "content": "hi"}]]
    # The conversation has no turns, so it is encoded as plain text.
    tokenizer.has_turns = False
    assert Prompt(text="##", is_turn=True).token_ids(tokenizer) == [2, 2]
