"""Prompts are read from files; texts and rows are their continuations."""

import json
import lzma
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxspec.errors import ConfigError, EngineGenerateError
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.train import texts as module
from jaxspec.train.__main__ import main, make_parser
from jaxspec.train.text import (
    ANSWER,
    PART_ROWS,
    PROMPT_TOKENS,
    WAYS,
    Text,
    frequent_tokens,
    given_text,
    pack,
    read_prompts,
    split_rows,
    temperatures_between,
    write_text,
)
from jaxspec.train.texts import model_digest, open_texts, write_texts
from jaxspec_checkpoints import bundled_draft, bundled_target

TOKENIZER = Tokenizer.from_folder(str(bundled_target()))
CHAT = f"<start_of_turn>user\nHi there<end_of_turn>\n{ANSWER}Hello."
LONG = "Once upon a time there was a small dragon who could not sleep at night. " * 12
PROMPTS = [f"Once upon a time, {number} dogs" for number in range(6)]


def write(path, *documents):
    lines = "\n".join(map(json.dumps, documents)) + "\n\n"
    content = lines.encode()
    path.write_bytes(lzma.compress(content) if path.suffix == ".xz" else content)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.xz"])
def test_prompts_are_read_from_files(tmp_path, suffix):
    pair = dict(prompt="1 + 1 =", completion=" 2")
    path = write(tmp_path / f"data{suffix}", dict(text=CHAT), dict(text=LONG), pair)
    found = read_prompts(path, TOKENIZER, length=256, seed=0)
    assert found == read_prompts(path, TOKENIZER, length=256, seed=0)
    by_start = {TOKENIZER.decode(head)[:6]: (head, tail) for head, tail in found}
    assert len(by_start) == 3
    head, tail = by_start["1 + 1 "]
    assert (TOKENIZER.decode(head), TOKENIZER.decode(tail)) == ("1 + 1 =", " 2")
    head, tail = by_start["Once u"]
    assert PROMPT_TOKENS[0] <= len(head) <= PROMPT_TOKENS[1]
    assert TOKENIZER.decode(head + tail) == LONG
    (rest,) = (head for start, (head, _) in by_start.items() if start[0] not in "1O")
    assert rest == TOKENIZER.encode(CHAT.removesuffix("Hello."))
    text = given_text(found, 64)
    assert text.sizes.max() == 64 and (text.starts == 0).all()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"text": "a"}\nno json', "data.jsonl, line 2, is not JSON"),
        ("[1]", r"line 1, must be a JSON object, got \[1\]"),
        ('{"body": "a"}', "document 1, has neither 'text' nor 'prompt': body"),
        ("", "no document with room for an answer in length=32"),
        (json.dumps(dict(prompt=LONG)), "no document with room"),
        (None, "data must be a file of JSON lines, got"),
    ],
)
def test_wrong_data_is_named(tmp_path, content, named):
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=named):
        read_prompts(path, TOKENIZER, length=32, seed=0)


class Echo:
    """Stands for `LLM`: repeats a prompt's first token, at most three times.

    It fails for prompts that begin with token 0.
    """

    def __init__(self, model=None, **options):
        self.params = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def generate(self, prompts, sampling_params, *, use_tqdm=False):
        self.params += sampling_params
        return [
            self.answer(prompt[0], min(3, params.max_tokens))
            for prompt, params in zip(prompts, sampling_params, strict=True)
        ]

    def answer(self, token, count):
        reasons = dict(finish_reason="length", stop_reason=None)
        if token == 0:
            reasons = dict(finish_reason="error", stop_reason="NaN")
        output = SimpleNamespace(token_ids=[token] * count, **reasons)
        return SimpleNamespace(outputs=[output])


def test_only_generated_tokens_count():
    echo, prompts = Echo(), [([number] * 7, [9]) for number in range(1, 401)]
    text = write_text(echo, prompts, length=10, num_tokens=500, seed=3)
    # Prompts are sent 100 at a time, and each has room for three more tokens. The
    # second batch exceeds the 500 tokens.
    assert len(text) == 200 and text.num_written == 600
    assert (text.starts == 7).all() and (text.sizes == 10).all()
    np.testing.assert_array_equal(text.tokens[5], [6] * 10)
    assert len({params.seed for params in echo.params}) == len(echo.params)
    temperatures = np.array([params.temperature for params in echo.params])
    for share, temperature, *_ in WAYS:
        assert abs((temperatures == temperature).mean() - share) <= 0.1


def test_failed_request_is_not_trained_on():
    with pytest.raises(EngineGenerateError, match="NaN"):
        write_text(Echo(), [([0] * 7, [9])], length=10, num_tokens=5, seed=3)


def test_rows_are_saved_and_cut(tmp_path):
    text = pack([([1, 2, 3], 1), (list(range(9)), 8)], 5)
    np.testing.assert_array_equal(text.tokens, [[1, 2, 3, 0, 0], [0, 1, 2, 3, 4]])
    assert text.sizes.tolist() == [3, 5] and text.starts.tolist() == [1, 5]
    text.save(tmp_path / "text.npz")
    again = Text.load(tmp_path / "text.npz")
    np.testing.assert_array_equal(again.rows([1]).tokens, text.tokens[1:])
    assert [path.name for path in tmp_path.iterdir()] == ["text.npz"]


def test_written_text_is_continued(tmp_path):
    prompts = [([number] * 7, [9]) for number in range(1, 401)]

    def write(writer, folder):
        sizes: dict[str, Any] = dict(length=10, num_tokens=500, seed=3, parts=folder)
        draw = temperatures_between(0.7, 1.0)
        return write_text(writer, prompts, draw=draw, **sizes)

    class Interrupted(Echo):
        def generate(self, prompts, sampling_params, **options):
            if self.params:
                raise KeyboardInterrupt
            return super().generate(prompts, sampling_params)

    whole, again = Echo(), Echo()
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    text = write(whole, tmp_path / "whole")
    # A part has 64 rows of three tokens each; the third part exceeds 500 tokens.
    assert len(text) == 3 * PART_ROWS
    assert all(0.7 <= params.temperature <= 1.0 for params in whole.params)
    with pytest.raises(KeyboardInterrupt):
        write(Interrupted(), tmp_path / "parts")
    resumed = write(again, tmp_path / "parts")
    np.testing.assert_array_equal(resumed.tokens, text.tokens)
    assert [params.seed for params in again.params] == [
        params.seed for params in whole.params[PART_ROWS:]
    ]


def test_held_out_rows_share_no_prompt_with_training():
    documents = [([1, 2, 3], 2), ([4, 5, 6], 2), ([1, 2, 9], 2), ([4, 5, 8], 2)]
    trained, held_out = split_rows(pack(documents, 4), 0.25)
    assert held_out.tokens[:, :3].tolist() == [[1, 2, 3], [1, 2, 9]]
    assert trained.tokens[:, :3].tolist() == [[4, 5, 6], [4, 5, 8]]


def test_frequent_tokens_are_ordered_for_a_map():
    text = pack([([7, 7, 7, 3, 3, 5], 3), ([9, 5, 5], 0)], 6)
    np.testing.assert_array_equal(frequent_tokens(text, 2, 20), [5, 3])
    # Then the tokens that do not occur, in order of their ids.
    np.testing.assert_array_equal(frequent_tokens(text, 5, 20), [5, 3, 9, 0, 1])
    found = frequent_tokens(text, 5, 20, first=[1, 9, 1, 30])
    np.testing.assert_array_equal(found, [1, 9, 5, 3, 0])


@pytest.fixture(name="arguments")
def _arguments(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LLM", Echo)
    files = {"data": PROMPTS[:4], "held-out-data": PROMPTS[4:]}
    found = ["text", "--target", str(bundled_draft()), "--out", str(tmp_path / "out")]
    for name, prompts in files.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
        found += [f"--{name}", str(path)]
    return [*found, "--length", "32", "--tokens", "12", "--held-out-tokens", "6"]


def test_texts_are_written_and_read(arguments, tmp_path, capsys):
    written = write_texts(make_parser().parse_args(arguments))
    assert (len(written.trained), len(written.held_out)) == (4, 2)
    assert written.trained.num_written == 12
    found = open_texts(tmp_path / "out")
    assert found.digest == written.digest
    assert found.settings["target"] == model_digest(bundled_draft())
    # A different seed is a different text.
    assert main([*arguments, "--seed", "1"]) == 2
    assert "holds texts with seed=0, got 1" in capsys.readouterr().err
    heads = {row[:start].tobytes() for row, start in rows(found.trained)}
    assert not heads & {row[:start].tobytes() for row, start in rows(found.held_out)}


def rows(text):
    return zip(text.tokens, text.starts, strict=True)


def test_shared_prompts_are_refused(arguments, tmp_path, capsys):
    path = tmp_path / "held-out-data.jsonl"
    path.write_text(json.dumps({"prompt": PROMPTS[1]}))
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert "held_out_data has 1 prompts of data" in shown and "1 dogs" in shown
    assert not (tmp_path / "out").exists()


def test_incomplete_folders_are_refused(arguments, tmp_path):
    with pytest.raises(ConfigError, match="texts must be a folder that"):
        open_texts(tmp_path)
    write_texts(make_parser().parse_args(arguments))
    (tmp_path / "out/held-out.npz").unlink()
    with pytest.raises(ConfigError, match=r"has no held-out.npz: .*interrupted"):
        open_texts(tmp_path / "out")
    path = tmp_path / "out/settings.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ConfigError, match="has format=2, but only 1 is supported"):
        open_texts(tmp_path / "out")


def test_texts_of_another_target_are_refused(arguments, tmp_path, capsys):
    write_texts(make_parser().parse_args(arguments))
    path = tmp_path / "out/settings.json"
    path.write_text(path.read_text().replace(model_digest(bundled_draft()), "other"))
    head = ["medusa", "--target", str(bundled_draft()), "--out", str(tmp_path / "head")]
    assert main([*head, "--texts", str(tmp_path / "out")]) == 2
    assert "whose files differ from the target's" in capsys.readouterr().err
    assert not (tmp_path / "head.work").exists()


def test_digest_changes_with_a_models_files(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/weights").write_bytes(bytes(3 * 2**20))
    before = model_digest(tmp_path / "a")
    (tmp_path / "a/weights").write_bytes(bytes(3 * 2**20 - 1) + b"1")
    assert model_digest(tmp_path / "a") != before
    assert model_digest(tmp_path / "a/weights")[:4].isalnum()
