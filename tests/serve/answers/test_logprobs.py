"""The two forms of log-probabilities."""

import math

from jaxspec.logprobs import Logprob
from jaxspec.serve.answers.logprobs import LEAST, LogprobWriter
from jaxspec.text.tokenizer import Tokenizer
from jaxspec_checkpoints import bundled_target
from tests.engines import StubTokenizer

# The token that came is the third most likely; another cannot come at all.
POSITION = {
    7: Logprob(-3.0, 3, "c"),
    8: Logprob(-1.0, 1, "a"),
    9: Logprob(-math.inf, 2, "b"),
}


def writer(*, as_ids: bool = False) -> LogprobWriter:
    return LogprobWriter(StubTokenizer(16), as_ids=as_ids)


def test_chats_tell_the_most_likely_by_rank():
    for num_top, expected in (
        (0, []),
        (1, ["a"]),
        (2, ["a", "b"]),
        (3, ["a", "b", "c"]),
    ):
        (entry,) = writer().for_chat([7], [POSITION], num_top)["content"]
        assert (entry["token"], entry["logprob"]) == ("c", -3.0)
        top = entry["top_logprobs"]
        assert [one["token"] for one in top] == expected
        assert all(one["logprob"] >= LEAST for one in top)


def test_what_a_request_has_chosen_is_told_whatever_it_ranks():
    told = {**POSITION, 10: Logprob(-7.0, None, "d")}
    (entry,) = writer().for_chat([7], [told], None)["content"]
    assert [one["token"] for one in entry["top_logprobs"]] == ["c", "a", "b", "d"]
    assert [one["logprob"] for one in entry["top_logprobs"]] == [-3, -1, LEAST, -7]


def test_completions_tell_the_token_and_the_most_likely():
    told = writer().for_completion([7, 7], [None, POSITION], 10)
    assert told == {
        "tokens": ["(", "c"],
        "token_logprobs": [None, -3.0],
        "top_logprobs": [None, {"c": -3.0, "a": -1.0, "b": LEAST}],
        "text_offset": [10, 11],
    }


def test_tokens_can_be_told_as_ids():
    told = writer(as_ids=True).for_completion([7], [POSITION], 0)
    assert told["tokens"] == ["token_id:7"]
    assert set(told["top_logprobs"][0]) == {"token_id:7", "token_id:8", "token_id:9"}


def test_of_prompts():
    assert writer().for_prompt(None) is None
    told = writer().for_prompt([None, POSITION])
    assert told is not None
    assert told[0] is None
    assert told[1]["9"] == {"logprob": LEAST, "rank": 2, "decoded_token": "b"}


def test_a_part_of_a_character_is_told_in_bytes():
    tokenizer = Tokenizer.from_folder(bundled_target())
    token_ids = tokenizer.encode("\U0001f9a9", add_special_tokens=False)
    told = [{token: Logprob(-1.0, 1, None)} for token in token_ids]
    chat = LogprobWriter(tokenizer, as_ids=False).for_chat(token_ids, told, 0)
    content = b"".join(bytes(one["bytes"]) for one in chat["content"])
    assert content.decode() == "\U0001f9a9"
    special = [{tokenizer.eos_token_id: Logprob(-1.0, 1, "<eos>")}]
    chat = LogprobWriter(tokenizer, as_ids=False).for_chat(
        [tokenizer.eos_token_id], special, 0
    )
    assert bytes(chat["content"][0]["bytes"]) == b"<eos>"
