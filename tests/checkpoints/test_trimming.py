"""Token maps are made from texts; a trimmed head keeps the first tokens' rows."""

import dataclasses
import hashlib
import json
import lzma
import shutil

import numpy as np
import pytest
import sentencepiece

from jaxspec_checkpoints import (
    CheckpointError,
    bundled_draft,
    in_memory,
    open_checkpoint,
    trimming,
)
from jaxspec_checkpoints import tensor as tensors
from jaxspec_checkpoints.checkpoint import TOKEN_MAP
from jaxspec_checkpoints.counting import (
    Counts,
    count_tokens,
    read_texts,
    write_token_map,
)
from jaxspec_checkpoints.trimming import read_token_map, rows_of
from tests.checkpoints.models import write_tiny

SPECIAL = [0, 1, 2, 3, 106, 107]
TEXTS = ["a quick fox\nand a dog", "<start_of_turn>user\nhi<end_of_turn>", "a a a"]
KEPT = [0, 3, 4, 5, 17, 40, 41, 99]
VALUES = np.random.default_rng(0).normal(size=(100, 8)).astype(np.float32)


def count(tmp_path, checkpoint=None):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    checkpoint = checkpoint or open_checkpoint(bundled_draft())
    return count_tokens(checkpoint, [path], progress=False)


@pytest.fixture(name="tokens", scope="module")
def _tokens() -> list[int]:
    """Return the tokens of all texts, encoded by SentencePiece itself."""
    path = bundled_draft() / "tokenizer.model"
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))  # pyright: ignore
    return [token for text in TEXTS for token in processor.encode(text)]


@pytest.mark.parametrize("file", ["tokenizer.model", "tokenizer.json"])
def test_tokens_are_counted_as_either_file_cuts_them(tmp_path, tokens, file):
    """Tokens that end texts count as special, whatever the tokenizer calls them."""
    folder = tmp_path / "model"
    write_tiny(folder, family="2b", vocab_size=8192)
    (folder / "tokenizer.model").unlink()
    shutil.copyfile(bundled_draft() / file, folder / file)
    ends = json.dumps({"eos_token_id": [1, 4711]})
    (folder / "generation_config.json").write_text(ends)
    counts = count(tmp_path, open_checkpoint(folder))
    assert counts.num_texts == len(TEXTS)
    expected = np.bincount(tokens, minlength=8192)
    np.testing.assert_array_equal(counts.frequency, expected)
    assert sorted(counts.special) == [*SPECIAL, 4711]


def test_special_tokens_come_first_then_the_frequent_then_the_lower():
    frequency = np.array([0, 5, 0, 7, 5, 0, 9])
    counts = Counts(special=[2, 4], frequency=frequency, num_texts=3)
    assert counts.ranked == [2, 4, 6, 3, 1, 0, 5]
    assert counts.share_of(3) == (0 + 5 + 9) / 26
    assert counts.share_of(7) == 1
    report = counts.report().splitlines()
    assert report[0] == "26 tokens of 3 texts; 4 of the vocabulary's 7 tokens occur"
    assert report[-1].endswith("      3 covers  53.85 % of them")


def test_a_map_that_was_written_is_read(tmp_path, tokens):
    counts, path = count(tmp_path), tmp_path / TOKEN_MAP
    write_token_map(path, counts)
    ids = read_token_map(path, 8192)
    assert ids == counts.ranked
    assert sorted(ids) == list(range(8192))
    counted = {*SPECIAL, *tokens}
    assert set(ids[: len(counted)]) == counted
    for taken, message in (
        (path, "exists already: name another"),
        (tmp_path / "nowhere" / "map.json", "nowhere"),
    ):
        with pytest.raises(CheckpointError, match=message):
            write_token_map(taken, counts)
    assert [one.name for one in tmp_path.glob(".trim*")] == []


def test_texts_come_from_lines_of_json_and_from_anything_else(tmp_path):
    lines = '{"text": "one\\ntwo"}\n\n{"prompt": "a ", "completion": "b", "n": 1}\n'
    (tmp_path / "some.jsonl").write_text(lines)
    (tmp_path / "some.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    (tmp_path / "some.v2.txt").write_text("first\nsecond")
    (tmp_path / "book.xz").write_bytes(lzma.compress(b"ein Wort\n"))
    for name in ("some.jsonl", "some.jsonl.xz"):
        assert list(read_texts(tmp_path / name)) == ["one\ntwo", "a b"]
    assert list(read_texts(tmp_path / "some.v2.txt")) == ["first\n", "second"]
    assert list(read_texts(tmp_path / "book.xz")) == ["ein Wort\n"]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("none.txt", None, "cannot be read"),
        ("some.jsonl", b"{}\n", "line 1, must be a JSON object with one of text"),
        ("some.jsonl", b'{"text": "a"}\n["text"]\n', "line 2, must be a JSON object"),
        ("some.jsonl", b"{text}\n", "line 1, is not JSON"),
        ("some.txt", b"\xff\xfe", "is not UTF-8 text"),
        ("some.txt.xz", b"plain", "is not UTF-8 text"),
        ("cut.txt.xz", lzma.compress(b"ein Wort\n" * 99)[:-9], "is not UTF-8 text"),
        ("empty.txt", b"", "the texts are empty"),
    ],
)
def test_a_file_that_is_no_text_is_named(tmp_path, name, content, named):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=named):
        checkpoint = open_checkpoint(bundled_draft())
        count_tokens(checkpoint, [tmp_path / name], progress=False)


def test_a_tokenizer_of_another_model_or_none_is_refused(tmp_path):
    write_tiny(tmp_path / "small", family="2b")
    model = tmp_path / "small" / "tokenizer.model"
    for change, message in (
        (lambda: None, "gives token id .* belongs to another"),
        (lambda: model.write_bytes(b"no model"), "the tokenizer of .* cannot be read"),
        (model.unlink, "no tokenizer.model and no tok"),
    ):
        change()
        with pytest.raises(CheckpointError, match=message):
            count(tmp_path, open_checkpoint(tmp_path / "small"))


@pytest.mark.parametrize("block_bytes", [32, 200, 10_000])
def test_rows_are_selected_by_number(monkeypatch, block_bytes):
    """No more is read at a time than a block of one, six or all rows."""
    monkeypatch.setattr(tensors, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(trimming, "BLOCK_BYTES", block_bytes)
    whole, reads = in_memory({"table": VALUES})["table"], []

    def read(start, stop):
        reads.append(stop - start)
        return VALUES[start:stop]

    found = rows_of(dataclasses.replace(whole, read=read), KEPT)
    assert found.shape == (len(KEPT), 8)
    np.testing.assert_array_equal(found.whole(), VALUES[KEPT])
    # Damage is found in rows that are not selected.
    digest = hashlib.sha256(VALUES.tobytes()).hexdigest()
    sound = rows_of(dataclasses.replace(whole, sha256=digest), KEPT)
    np.testing.assert_array_equal(sound.whole(), VALUES[KEPT])
    damaged = rows_of(dataclasses.replace(whole, sha256="0" * 64), KEPT[:2])
    with pytest.raises(CheckpointError, match="damaged"):
        damaged.whole()
    for start, stop in [(0, 8), (2, 3), (3, 7), (7, 8)]:
        np.testing.assert_array_equal(found.read(start, stop), VALUES[KEPT[start:stop]])
    assert max(reads) <= max(1, block_bytes // 32)
