"""The contract with clients of vLLM, as a table of requests and expected responses.

The table follows vLLM's own tests of its OpenAI server, except those that need a large
model or that other tests here cover. All requests go to one server.
"""

from typing import Any

import pytest

from tests.support.fake_engines import letters, said
from tests.support.serving import CHAT, COMPLETIONS, MESSAGES, PROMPT, Client

VOCAB = 16
SAID = letters(said(5))
COUNTS = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
HUGE = 2**63
CHOSEN = [13, 2, 15]
CHOSEN_AS_IDS = {f"token_id:{token}" for token in CHOSEN}
# Fields of every request, unless it has others.
BASE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": 5},
    CHAT: {"messages": MESSAGES, "max_tokens": 5},
}
BOTH = (COMPLETIONS, CHAT)
Fields = dict[str, Any]


def only(answer: Any) -> Any:
    (choice,) = answer["choices"]
    return choice


def logprobs_of(answer: Any, name: str = "top_logprobs") -> Any:
    return only(answer)["logprobs"][name]


def num_top(answer: Any) -> list[int]:
    """Return the number of top logprobs of each generated token."""
    logprobs = only(answer)["logprobs"]
    if "content" in logprobs:
        return [len(entry["top_logprobs"]) for entry in logprobs["content"]]
    return [len(entry) for entry in logprobs["top_logprobs"]]


def prompt_logprobs(answer: Any) -> list[Any]:
    is_text = answer["object"] == "text_completion"
    return (only(answer) if is_text else answer)["prompt_logprobs"]


def length(answer: Any) -> int:
    return answer["usage"]["completion_tokens"]


def ids_in(events: list[Any]) -> list[int]:
    return sum((only(one).get("token_ids") or [] for one in events), [])


# Requests, and conditions on their responses or on the events of their streams.
ANSWERED: list[tuple[str, Fields, Any]] = [
    # Logprobs of completions: none, only the token's own, several.
    (COMPLETIONS, {}, lambda a: only(a)["logprobs"] is None),
    (COMPLETIONS, {"logprobs": 0}, lambda a: num_top(a) == [1] * 5),
    (COMPLETIONS, {"logprobs": 5}, lambda a: {*num_top(a)} <= {5, 6}),
    (
        COMPLETIONS,
        {"logprobs": 1},
        lambda a: (
            logprobs_of(a, "tokens") == list(SAID)
            and logprobs_of(a, "text_offset") == list(range(5))
            and max(logprobs_of(a, "token_logprobs")) < 0
        ),
    ),
    (
        COMPLETIONS,
        {
            "logprobs": 1,
            "logprob_token_ids": CHOSEN,
            "return_tokens_as_token_ids": True,
        },
        lambda a: (
            [{own} | CHOSEN_AS_IDS for own in logprobs_of(a, "tokens")]
            == list(map(set, logprobs_of(a)))
        ),
    ),
    # Logprobs of prompts: the first token has none; -1 returns the whole vocabulary.
    *(
        (
            path,
            {"prompt_logprobs": count},
            lambda a, allowed=allowed: (
                prompt_logprobs(a)[0] is None
                and {len(one) for one in prompt_logprobs(a)[1:]} <= allowed
            ),
        )
        for path in BOTH
        for count, allowed in ((0, {1}), (1, {1, 2}), (-1, {VOCAB}))
    ),
    # Echoed tokens have logprobs like generated ones.
    (
        COMPLETIONS,
        {"echo": True, "logprobs": 1},
        lambda a: (
            only(a)["text"] == PROMPT + SAID
            and {len(one) for one in only(a)["logprobs"].values()} == {8}
            and logprobs_of(a, "token_logprobs")[0] is logprobs_of(a)[0] is None
        ),
    ),
    # Logprobs of chats.
    (CHAT, {}, lambda a: only(a)["logprobs"] is None),
    (CHAT, {"logprobs": False}, lambda a: only(a)["logprobs"] is None),
    (CHAT, {"logprobs": True}, lambda a: num_top(a) == [0] * 5),
    (CHAT, {"logprobs": True, "top_logprobs": 0}, lambda a: num_top(a) == [0] * 5),
    (CHAT, {"logprobs": True, "top_logprobs": 5}, lambda a: num_top(a) == [5] * 5),
    (
        CHAT,
        {"logprobs": True, "top_logprobs": 1, "logprob_token_ids": CHOSEN},
        lambda a: {*num_top(a)} <= {3, 4},
    ),
    # Several prompts and texts.
    (
        COMPLETIONS,
        {"prompt": [PROMPT, PROMPT]},
        lambda a: [one["text"] for one in a["choices"]] == [SAID] * 2,
    ),
    (
        CHAT,
        {"n": 2},
        lambda a: (
            len(a["choices"]) == 2
            and a["usage"] == COUNTS | {"completion_tokens": 10, "total_tokens": 13}
        ),
    ),
    # Lengths and ends of texts.
    (CHAT, {"max_completion_tokens": 2}, lambda a: length(a) == 2),
    (COMPLETIONS, {"max_tokens": None}, lambda a: length(a) == 93),
    (
        COMPLETIONS,
        {"stop": SAID[3]},
        lambda a: (
            (only(a)["text"], only(a)["finish_reason"], only(a)["stop_reason"])
            == (SAID[:3], "stop", SAID[3])
        ),
    ),
    (
        COMPLETIONS,
        {"stop": [SAID[3]], "include_stop_str_in_output": True},
        lambda a: only(a)["text"] == SAID[:4],
    ),
    (
        COMPLETIONS,
        {"stop_token_ids": [said(4)[3]]},
        lambda a: (
            (only(a)["text"], only(a)["finish_reason"], only(a)["stop_reason"])
            == (SAID[:3], "stop", said(4)[3])
        ),
    ),
    # The end of a stream.
    *(
        (
            path,
            {"stream": True, "stream_options": {"include_usage": True}},
            lambda e: (e[-1]["choices"], e[-1]["usage"]) == ([], COUNTS),
        )
        for path in BOTH
    ),
    *(
        (path, {"stream": True}, lambda e: not any(one.get("usage") for one in e))
        for path in BOTH
    ),
    # Values at the limits.
    *((path, {"seed": seed}, None) for path in BOTH for seed in (HUGE - 1, -HUGE, -1)),
    *((COMPLETIONS, {"top_k": value}, None) for value in (-1, 0)),
    *((COMPLETIONS, {name: 1}, None) for name in ("top_p", "min_p")),
    (COMPLETIONS, {"temperature": 2}, None),
    (COMPLETIONS, {"presence_penalty": -2}, None),
    (COMPLETIONS, {"truncate_prompt_tokens": 1}, None),
    (COMPLETIONS, {"n": 128}, None),
    # Unknown fields are allowed, and fields may be null.
    (CHAT, {"extra_field": "x"}, lambda a: length(a) == 5),
    (CHAT, {"model": None}, lambda a: a["model"] == "model"),
    (CHAT, {"user": "me", "metadata": {"a": "b"}}, lambda a: length(a) == 5),
    (CHAT, {"temperature": None, "stop": None}, lambda a: length(a) == 5),
    # Ids and text of the prompt are in the first event of a stream, of chats outside
    # `choices`.
    (
        COMPLETIONS,
        {"return_token_ids": True},
        lambda a: (
            (only(a)["prompt_token_ids"], only(a)["token_ids"]) == ([2, 3, 4], said(5))
        ),
    ),
    (
        COMPLETIONS,
        {"return_token_ids": True, "stream": True},
        lambda e: (
            ids_in(e) == said(5)
            and [only(one).get("prompt_token_ids") for one in e]
            == [[2, 3, 4], *[None] * len(e[1:])]
        ),
    ),
    (
        CHAT,
        {"return_token_ids": True, "return_prompt_text": True, "stream": True},
        lambda e: (
            ids_in(e) == said(5)
            and [one.get("prompt_token_ids") for one in e]
            == [[2, 3, 4], *[None] * len(e[1:])]
            and [one for one in e if "prompt_text" in one] == e[:1]
            and "prompt_token_ids" not in only(e[0])
        ),
    ),
    (
        COMPLETIONS,
        {"prompt": PROMPT * 3, "truncate_prompt_tokens": 2},
        lambda a: a["usage"]["prompt_tokens"] == 2,
    ),
]
# Requests with a mistake in the first of these fields. They are refused before a stream
# begins.
REFUSED: list[tuple[str, Fields]] = [
    (COMPLETIONS, {"logprob_token_ids": CHOSEN}),
    (COMPLETIONS, {"logprobs": 21}),
    (COMPLETIONS, {"prompt_logprobs": -2}),
    (COMPLETIONS, {"max_tokens": 0}),
    (COMPLETIONS, {"min_tokens": 6}),
    (COMPLETIONS, {"prompt": PROMPT * 40}),
    (COMPLETIONS, {"prompt": [[2, 3], [99]]}),
    (COMPLETIONS, {"priority": 2**31}),
    (COMPLETIONS, {"n": 2, "temperature": 0}),
    (COMPLETIONS, {"logit_bias": {"77": 1}}),
    (COMPLETIONS, {"stop": ["#"] * 9000}),
    (CHAT, {"logprob_token_ids": CHOSEN}),
    (
        CHAT,
        {"logprob_token_ids": CHOSEN, "logprobs": True, "use_beam_search": True},
    ),
    (CHAT, {"top_logprobs": 1}),
    *((path, {"seed": seed}) for path in BOTH for seed in (HUGE, -HUGE - 1)),
]


def ids_of(rows: list[Any]) -> list[str]:
    return [f"{path} {str(fields)[:80]}" for path, fields, *_ in rows]


@pytest.mark.parametrize(("path", "fields", "holds"), ANSWERED, ids=ids_of(ANSWERED))
def test_response_meets_contract(http: Client, path: str, fields: Fields, holds: Any):
    answer = http.ask(path, **BASE[path] | fields)
    assert holds is None or holds(answer), answer


@pytest.mark.parametrize(("path", "fields"), REFUSED, ids=ids_of(REFUSED))
def test_refuses_mistake_with_its_field(http: Client, path: str, fields: Fields):
    for is_stream in (False, True):
        error = http.refusal(path, BASE[path] | fields | {"stream": is_stream})
        assert error["param"] == next(iter(fields))
    # After a refusal, the server still generates.
    assert only(http.ask(COMPLETIONS, **BASE[COMPLETIONS]))["text"] == SAID


def test_refuses_fields_that_contradict_stream(http: Client):
    options = {"stream_options": {"include_usage": True}}
    for path in BOTH:
        assert http.refusal(path, BASE[path] | options)["param"] == "stream_options"
    fields = {"prompt_logprobs": 1, "stream": True}
    error = http.refusal(COMPLETIONS, BASE[COMPLETIONS] | fields)
    assert error["param"] == "prompt_logprobs"
    fields = {"logprobs": True, "top_logprobs": 21}
    assert http.refusal(CHAT, BASE[CHAT] | fields)["param"] == "logprobs"


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("", 415),
    ],
)
def test_status_follows_the_content_type(http: Client, kind: str, status: int):
    body = b'{"prompt": "%s"}' % PROMPT.encode()
    response = http.post(COMPLETIONS, content=body, headers={"content-type": kind})
    assert response.status_code == status
