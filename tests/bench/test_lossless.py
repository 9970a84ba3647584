"""`bench lossless` finds differing texts on any server, and says what was compared."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from jaxspec.bench import lossless
from jaxspec.bench.__main__ import main
from jaxspec.bench.lossless import Text, compare, read_text, verdict_of
from tests.support.fake_engines import letters, said
from tests.support.serving import PROMPT, Site, site_of

SIZES = ["--num-prompts", "3", "--output-len", "6", "--max-concurrency", "2"]


def text(*tokens: str, logprobs: list[float] | None = None, **top: float) -> Text:
    values = logprobs or [-1.0] * len(tokens)
    return Text(
        text="".join(tokens),
        tokens=list(tokens),
        logprobs=values,
        top=[dict(top)] * len(tokens),
    )


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (text("a", "b"), None),
        (text("a", "c"), [1, "b", "c", 0.5]),
        (text("x", "b"), [0, "a", "x", None]),
        (text("a"), {"character": 1, "gap": None}),
        (Text(text="ac"), {"character": 1, "gap": None}),
    ],
)
def test_first_difference_and_its_gap(other, expected):
    if isinstance(expected, list):
        names = ("token_number", "reference_token", "token", "gap")
        expected = dict(zip(names, expected, strict=True))
    assert compare(text("a", "b", c=-1.5, b=-1.0), other) == expected


@pytest.mark.parametrize(
    ("others", "verdict", "num_equal"),
    [
        ([text("a", "b"), text("a", "b")], "equal", 2),
        ([text("a", "c"), text("a", "b")], "near ties", 1),
        ([text("a", "c"), text("a", "d")], "different", 0),  # no logprob of "d"
        ([text("a", "e"), text("a", "b")], "different", 1),
    ],
)
def test_verdict_covers_all_texts(others, verdict, num_equal):
    reference = [text("a", "b", c=-1.01, e=-2.0)] * 2
    found = verdict_of(reference, others, 0.05)
    assert (found["verdict"], found["num_equal"]) == (verdict, num_equal)
    assert found["num_texts"] == 2
    assert len(found["differences"]) == 2 - num_equal


def test_logprobs_are_compared_up_to_the_first_other_token():
    one = text("a", "b", "c", logprobs=[-1.0, -2.0, -3.0])
    other = text("a", "x", "c", logprobs=[-1.25, -9.0, -9.0])
    assert lossless.logprob_error([one], [other]) == 0.25
    assert lossless.logprob_error([Text(text="a")], [Text(text="a")]) is None


def test_reads_logprobs_of_completions_and_of_chats():
    completions = {
        "tokens": ["a", "b"],
        "token_logprobs": [-1.0, -2.0],
        "top_logprobs": [{"a": -1.0}, None],
    }
    entry = {"token": "b", "logprob": -2.0}
    chats = {"content": [{"token": "a", "logprob": -1.0, "top_logprobs": [
        {"token": "a", "logprob": -1.0}
    ]}, entry]}  # fmt: skip
    expected = Text(
        text="ab", tokens=["a", "b"], logprobs=[-1.0, -2.0], top=[{"a": -1.0}, {}]
    )
    for logprobs in (completions, chats):
        assert read_text({"text": "ab", "logprobs": logprobs}) == expected
    assert read_text({"text": "ab", "logprobs": None}) == Text(text="ab")


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with site_of() as made:
        yield made


@pytest.fixture
def measure(site, tmp_path) -> Any:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": PROMPT}) + "\n")
    words = ["lossless", "--base-url", site.url, "--dataset-path", str(path), *SIZES]
    return lambda *more: main([*words, *more])


def test_equal_texts_are_lossless(measure, tmp_path, capsys):
    path = tmp_path / "result.json"
    assert measure("--output-json", str(path)) == 0
    printed = capsys.readouterr().out
    assert "| greedy, 2 at once | 3 of 3 | - | equal |" in printed
    assert printed.splitlines()[-1].startswith("LOSSLESS")
    result = json.loads(path.read_text())
    assert result["is_lossless"] and result["num_drafts"] > 0
    names = [case["case"] for case in result["cases"]]
    assert [name.partition(",")[0] for name in names] == [
        "greedy", "greedy", "greedy", "greedy", "seeded", "seeded",
        "the reference itself",
    ]  # fmt: skip
    assert all(
        case["num_equal"] == 3 for case in result["cases"] if "num_equal" in case
    )


def test_other_texts_are_not_lossless(measure, capsys):
    # Texts that end early stand for those of another model.
    early = json.dumps({"stop": letters(said(4)[3:])})
    other = json.dumps({"num_speculative_tokens": 0})
    assert measure("--extra-body", early, "--other-extra-body", other) == 1
    printed = capsys.readouterr()
    assert "| different |" in printed.out
    assert "NOT LOSSLESS" in printed.out
    assert "not lossless" in printed.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--extra-body", '{"num_speculative_tokens": 0}'], "made no drafts"),
        (["--model", "other"], "does not exist"),
    ],
)
def test_invalid_comparison_is_an_error(flags, message, measure, capsys):
    assert measure(*flags) == 1
    assert message in capsys.readouterr().err


def test_reference_of_another_server_must_be_named(measure, monkeypatch, capsys):
    async def model(url: str, headers: Any) -> tuple[str, str]:
        return "model", "someone"

    monkeypatch.setattr(lossless, "_model", model)
    assert measure() != 0
    assert "--other-base-url must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [["--num-prompts", "0"], ["--max-concurrency", "1"], ["--tie-gap", "-1"]]
)
def test_wrong_flags_are_refused(flags, capsys):
    assert main(["lossless", "--base-url", "http://127.0.0.1:9", *flags]) == 2
    assert flags[0] in capsys.readouterr().err
