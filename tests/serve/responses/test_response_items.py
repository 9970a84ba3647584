"""Items of a response, and their events. Tests of the server check whole streams."""

import pytest

from jaxspec.serve.responses.response_items import Message, Token, take_tokens

WORDS = ["Let", " me", " see", "é", ".\n", "[{", '"name"']


def tokens(*texts: str) -> list[Token]:
    return [Token(text.encode()) for text in texts]


@pytest.mark.parametrize(
    ("words", "taken", "left"),
    [
        ("Let me", ["Let", " me"], WORDS[2:]),
        ("me see", [" me", " see"], WORDS[3:]),
        ("Let me seeé.\n", WORDS[:5], WORDS[5:]),
        (" m", [" me"], WORDS[2:]),
        ('[{"na', ["[{", '"name"'], []),
        ("other words", WORDS, []),
        ("", [], WORDS),
    ],
)
def test_take_tokens_takes_those_of_the_text(
    words: str, taken: list[str], left: list[str]
):
    waiting = tokens(*WORDS)
    assert take_tokens(waiting, words) == tokens(*taken)
    assert waiting == tokens(*left)


def test_take_tokens_with_partial_characters():
    first, second = "é".encode()[:1], "é".encode()[1:]
    waiting = [Token(b"["), Token(first), Token(b""), Token(second), Token(b"]")]
    taken = take_tokens(waiting, "é")
    assert [one.content for one in taken] == [first, b"", second]
    assert waiting == [Token(b"]")]


def test_empty_delta_has_no_event():
    message = Message("msg_1", 0, has_origins=False)
    assert message.add("", []) is None
    assert message.add("", [Token(b"")]) is None
    assert message.add("", [Token(b"", {"token": "x"})]) is not None
    assert message.add("x", []) is not None
    assert message.as_json("completed")["content"][0]["text"] == "x"
