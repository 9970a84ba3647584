"""The log-probability formats of completions and of chats."""

import math

from jaxspec.logprobs import Logprob
from jaxspec.serve.responses.logprobs import MIN_LOGPROB, LogprobWriter, prompt_offsets
from jaxspec.text.tokenizer import Tokenizer
from jaxspec_checkpoints import bundled_target
from tests.support.engines import StubTokenizer

# The generated token has rank 3, and another token has probability 0.
POSITION = {
    7: Logprob(-3.0, 3, "c"),
    8: Logprob(-1.0, 1, "a"),
    9: Logprob(-math.inf, 2, "b"),
}


def writer(*, as_ids: bool = False) -> LogprobWriter:
    return LogprobWriter(StubTokenizer(16), as_ids=as_ids)


def test_chat_top_logprobs_are_ordered_by_rank():
    for num_top, expected in (
        (0, []),
        (1, ["a"]),
        (2, ["a", "b"]),
        (3, ["a", "b", "c"]),
        (-1, ["a", "b", "c"]),
    ):
        (entry,) = writer().for_chat([7], [POSITION], num_top)["content"]
        assert (entry["token"], entry["logprob"]) == ("c", -3.0)
        top = entry["top_logprobs"]
        assert [one["token"] for one in top] == expected
        assert all(one["logprob"] >= MIN_LOGPROB for one in top)


def test_chat_returns_requested_ids_in_order():
    position = {**POSITION, 10: Logprob(-7.0, None, "d")}
    (entry,) = writer().for_chat([7], [position], None)["content"]
    assert [one["token"] for one in entry["top_logprobs"]] == ["c", "a", "b", "d"]
    logprobs = [one["logprob"] for one in entry["top_logprobs"]]
    assert logprobs == [-3, -1, MIN_LOGPROB, -7]


def test_completion_format():
    written = writer().for_completion([7, 7], [None, POSITION], [10, 11])
    assert written == {
        "tokens": ["(", "c"],
        "token_logprobs": [None, -3.0],
        "top_logprobs": [None, {"c": -3.0, "a": -1.0, "b": MIN_LOGPROB}],
        "text_offset": [10, 11],
    }


def test_tokens_as_ids():
    written = writer(as_ids=True).for_completion([7], [POSITION], [0])
    assert written["tokens"] == ["token_id:7"]
    assert set(written["top_logprobs"][0]) == {"token_id:7", "token_id:8", "token_id:9"}


def test_prompt_format():
    assert writer().for_prompt(None) is None
    written = writer().for_prompt([None, POSITION])
    assert written is not None
    assert written[0] is None
    assert written[1]["9"] == {"logprob": MIN_LOGPROB, "rank": 2, "decoded_token": "b"}


def test_partial_character_as_bytes():
    tokenizer = Tokenizer.from_folder(bundled_target())
    token_ids = tokenizer.encode("\U0001f9a9", add_special_tokens=False)
    positions = [{token: Logprob(-1.0, 1, None)} for token in token_ids]
    chat = LogprobWriter(tokenizer, as_ids=False).for_chat(token_ids, positions, 0)
    content = b"".join(bytes(one["bytes"]) for one in chat["content"])
    assert content.decode() == "\U0001f9a9"
    special = [{tokenizer.eos_token_id: Logprob(-1.0, 1, "<eos>")}]
    chat = LogprobWriter(tokenizer, as_ids=False).for_chat(
        [tokenizer.eos_token_id], special, 0
    )
    assert bytes(chat["content"][0]["bytes"]) == b"<eos>"


def test_tokens_with_equal_texts():
    tokenizer = Tokenizer.from_folder(bundled_target())
    first, second, *_ = tokenizer.encode("\U0001f9a9", add_special_tokens=False)[1:]
    assert tokenizer.decode([first]) == tokenizer.decode([second]) == "\ufffd"
    position = {first: Logprob(-2.0, 2), second: Logprob(-1.0, 1)}
    writer = LogprobWriter(tokenizer, as_ids=False)
    found = writer.for_completion([first], [position], [0])
    assert found["tokens"] == ["bytes:\\x9f"]
    assert found["top_logprobs"] == [{"bytes:\\x9f": -2.0, "bytes:\\xa6": -1.0}]
    # The two tokens have the same text: the value of the generated one is returned.
    position = {7: Logprob(-2.0, 2, "a"), 8: Logprob(-1.0, 1, "a")}
    found = writer.for_completion([7], [position], [0])
    assert found["top_logprobs"] == [{"a": -2.0}]


def test_prompt_offsets_refer_to_echoed_text():
    tokenizer = Tokenizer.from_folder(bundled_target())
    text = "<start_of_turn>Cr\u00e8me \U0001f600 fox"
    token_ids = tokenizer.encode(text)
    whole = prompt_offsets(
        tokenizer, text, token_ids, is_spelled=True, is_cut_right=False
    )
    assert whole[:3] == [0, 0, len("<start_of_turn>")]
    assert whole[-1] == text.index(" fox")
    # The offset of every ordinary token is where its own text begins.
    for token, offset in zip(token_ids[2:], whole[2:], strict=True):
        if not tokenizer.is_byte(token):
            assert text.startswith(tokenizer.decode([token]), offset)
    for cut, is_right in ((token_ids[-4:], False), (token_ids[:4], True)):
        found = prompt_offsets(
            tokenizer, text, cut, is_spelled=True, is_cut_right=is_right
        )
        assert found == (whole[:4] if is_right else whole[-4:])
    # Special tokens are hidden in a text decoded from ids.
    decoded = tokenizer.decode(token_ids)
    hidden = prompt_offsets(
        tokenizer, decoded, token_ids, is_spelled=False, is_cut_right=False
    )
    assert hidden[:3] == [0, 0, 0]
    assert hidden[2:] == [offset - whole[2] for offset in whole[2:]]
