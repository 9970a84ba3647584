"""The log-probability formats of completions and of chats."""

import math

from jaxspec.logprobs import Logprob
from jaxspec.serve.responses.logprobs import MIN_LOGPROB, LogprobWriter, prompt_offsets
from jaxspec.text.tokenizer import Tokenizer
from jaxspec_checkpoints import bundled_target
from tests.support.engines import StubTokenizer

TOKENIZER = Tokenizer.from_folder(bundled_target())
# The generated token has rank 3, and another token has probability 0.
POSITION = {
    7: Logprob(-3.0, 3, "c"),
    8: Logprob(-1.0, 1, "a"),
    9: Logprob(-math.inf, 2, "b"),
}


def writer(*, as_ids: bool = False) -> LogprobWriter:
    return LogprobWriter(StubTokenizer(16), as_ids=as_ids)


def test_chat_top_logprobs_are_ordered_by_rank():
    tops = {0: [], 1: ["a"], 2: ["a", "b"], 3: ["a", "b", "c"], -1: ["a", "b", "c"]}
    for num_top, expected in tops.items():
        (entry,) = writer().for_chat([7], [POSITION], num_top)["content"]
        assert (entry["token"], entry["logprob"]) == ("c", -3.0)
        top = entry["top_logprobs"]
        assert [one["token"] for one in top] == expected
        assert all(one["logprob"] >= MIN_LOGPROB for one in top)
    # Requested ids keep their order.
    position = {**POSITION, 10: Logprob(-7.0, None, "d")}
    (entry,) = writer().for_chat([7], [position], None)["content"]
    found = {one["token"]: one["logprob"] for one in entry["top_logprobs"]}
    assert list(found.items()) == [("c", -3), ("a", -1), ("b", MIN_LOGPROB), ("d", -7)]


def test_completion_logprobs_have_openais_format():
    written = writer().for_completion([7, 7], [None, POSITION], [10, 11])
    assert written == {
        "tokens": ["(", "c"],
        "token_logprobs": [None, -3.0],
        "top_logprobs": [None, {"c": -3.0, "a": -1.0, "b": MIN_LOGPROB}],
        "text_offset": [10, 11],
    }


def test_prompt_logprobs_have_vllms_format():
    assert writer().for_prompt(None) is None
    written = writer().for_prompt([None, POSITION])
    assert written is not None
    assert written[0] is None
    assert written[1]["9"] == {"logprob": MIN_LOGPROB, "rank": 2, "decoded_token": "b"}


def test_partial_character_as_bytes():
    token_ids = TOKENIZER.encode("\U0001f9a9", add_special_tokens=False)
    writer = LogprobWriter(TOKENIZER, as_ids=False)
    for ids, text in ((token_ids, "\U0001f9a9"), ([TOKENIZER.eos_token_id], "<eos>")):
        chat = writer.for_chat(ids, [{token: Logprob(-1.0, 1)} for token in ids], 0)
        content = b"".join(bytes(one["bytes"]) for one in chat["content"])
        assert content.decode() == text


def test_tokens_with_equal_texts_have_distinct_keys():
    first, second, *_ = TOKENIZER.encode("\U0001f9a9", add_special_tokens=False)[1:]
    assert TOKENIZER.decode([first]) == TOKENIZER.decode([second]) == "\ufffd"
    position = {first: Logprob(-2.0, 2), second: Logprob(-1.0, 1)}
    writer = LogprobWriter(TOKENIZER, as_ids=False)
    found = writer.for_completion([first], [position], [0])
    assert found["tokens"] == ["bytes:\\x9f"]
    assert found["top_logprobs"] == [{"bytes:\\x9f": -2.0, "bytes:\\xa6": -1.0}]
    # As from the engine, where the bytes of a character have no text until its last.
    position = {first: Logprob(-2.0, 2, ""), second: Logprob(-1.0, 1, "")}
    found = writer.for_completion([first], [position], [0])
    assert found["tokens"] == [""]
    assert found["top_logprobs"] == [{"": -2.0, "bytes:\\xa6": -1.0}]
    # The two tokens have the same text: the value of the generated one is returned.
    position = {7: Logprob(-2.0, 2, "a"), 8: Logprob(-1.0, 1, "a")}
    found = writer.for_completion([7], [position], [0])
    assert found["top_logprobs"] == [{"a": -2.0}]


def test_prompt_offsets_refer_to_echoed_text():
    text = "<start_of_turn>Cr\u00e8me \U0001f600 fox"
    token_ids = TOKENIZER.encode(text)

    def offsets(
        text: str, ids: list[int], *, is_spelled: bool = True, is_right: bool = False
    ) -> list[int]:
        cut = {"is_spelled": is_spelled, "is_cut_right": is_right}
        return prompt_offsets(TOKENIZER, text, ids, **cut)

    whole = offsets(text, token_ids)
    assert whole[:3] == [0, 0, len("<start_of_turn>")]
    assert whole[-1] == text.index(" fox")
    # The offset of every ordinary token is where its own text begins.
    for token, offset in zip(token_ids[2:], whole[2:], strict=True):
        if not TOKENIZER.is_byte(token):
            assert text.startswith(TOKENIZER.decode([token]), offset)
    assert offsets(text, token_ids[-4:]) == whole[-4:]
    assert offsets(text, token_ids[:4], is_right=True) == whole[:4]
    # Special tokens are hidden in a text decoded from ids.
    hidden = offsets(TOKENIZER.decode(token_ids), token_ids, is_spelled=False)
    assert hidden[:3] == [0, 0, 0]
    assert hidden[2:] == [offset - whole[2] for offset in whole[2:]]
