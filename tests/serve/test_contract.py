"""The contract with clients of vLLM, as a table of requests and expected responses.

The table follows vLLM's own tests of its OpenAI server, except those that need a large
model or that other tests here cover. All requests go to one server.
"""

from collections.abc import Iterable
from typing import Any

import pytest

from tests.support.fake_engines import letters, said
from tests.support.serving import CHAT, COMPLETIONS, MESSAGES, PROMPT, Client

VOCAB = 16
SAID = letters(said(5))
HUGE = 2**63
CHOSEN = {"logprob_token_ids": [13, 2, 15]}
RESPONSES = "/v1/responses"
# Fields of every request, unless it has others.
BASE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": 5},
    CHAT: {"messages": MESSAGES, "max_tokens": 5},
    RESPONSES: {"input": PROMPT},
}
BOTH = (COMPLETIONS, CHAT)
IDS = {"return_token_ids": True, "stream": True}
Fields = dict[str, Any]


def only(answer: Any) -> Any:
    (choice,) = answer["choices"]
    return choice


def text(answer: Any) -> str:
    return only(answer)["text"]


def ended(answer: Any) -> tuple[Any, ...]:
    return tuple(
        only(answer)[name] for name in ("text", "finish_reason", "stop_reason")
    )


def num_tokens(answer: Any) -> int:
    return answer["usage"]["completion_tokens"]


def logprobs(answer: Any) -> Any:
    return only(answer)["logprobs"]


def num_top(answer: Any) -> list[int]:
    """Return the number of top logprobs of each generated token."""
    found = logprobs(answer)
    if "content" in found:
        return [len(entry["top_logprobs"]) for entry in found["content"]]
    return [len(entry) for entry in found["top_logprobs"]]


def has_chosen(answer: Any) -> bool:
    """Return whether each token has the log-probabilities of itself and of `CHOSEN`."""
    chosen = {f"token_id:{token}" for token in CHOSEN["logprob_token_ids"]}
    found = logprobs(answer)
    return [{own} | chosen for own in found["tokens"]] == [
        *map(set, found["top_logprobs"])
    ]


def num_of_prompt(answer: Any) -> list[int]:
    """Return the number of logprobs of each prompt token; the first has none."""
    is_text = answer["object"] == "text_completion"
    first, *others = (only(answer) if is_text else answer)["prompt_logprobs"]
    assert first is None
    return [len(one) for one in others]


def first_logprobs(answer: Any) -> list[Any]:
    return [logprobs(answer)[name][0] for name in ("token_logprobs", "top_logprobs")]


def token_ids(events: list[Any]) -> list[int]:
    return sum((only(one).get("token_ids") or [] for one in events), [])


def prompt_ids(parts: Iterable[Any]) -> list[Any]:
    return [one.get("prompt_token_ids") for one in parts]


def only_first(content: Any, events: list[Any]) -> list[Any]:
    return [content, *[None] * (len(events) - 1)]


# Requests, functions of their responses or of the events of their streams, and the
# expected values.
Rows = list[tuple[Fields, Any, Any]]
OF_COMPLETIONS: Rows = [
    # Logprobs: only the token's own, several, of chosen tokens, of echoed ones.
    ({"logprobs": 0}, num_top, [1] * 5),
    ({"logprobs": 5}, lambda a: {*num_top(a)} <= {5, 6}, True),
    ({"logprobs": 1}, lambda a: logprobs(a)["text_offset"], [*range(5)]),
    ({"logprobs": 1}, lambda a: max(logprobs(a)["token_logprobs"]) < 0, True),
    (CHOSEN | {"logprobs": 1, "return_tokens_as_token_ids": True}, has_chosen, True),
    ({"echo": True, "logprobs": 1}, first_logprobs, [None, None]),
    # Lengths and ends of texts.
    ({"max_tokens": None}, num_tokens, 93),
    ({"stop": SAID[3]}, ended, (SAID[:3], "stop", SAID[3])),
    ({"stop": [SAID[3]], "include_stop_str_in_output": True}, text, SAID[:4]),
    ({"stop_token_ids": [said(4)[3]]}, ended, (SAID[:3], "stop", said(4)[3])),
    # Values at the limits.
    *(({"top_k": value}, num_tokens, 5) for value in (-1, 0)),
    *(({name: 1}, num_tokens, 5) for name in ("top_p", "min_p")),
    ({"temperature": 2}, num_tokens, 5),
    ({"presence_penalty": -2}, num_tokens, 5),
    ({"truncate_prompt_tokens": 1}, num_tokens, 5),
    ({"n": 128}, lambda a: len(a["choices"]), 128),
    # Ids of the prompt are in the first event of a stream.
    ({"return_token_ids": True}, lambda a: prompt_ids([only(a)]), [[2, 3, 4]]),
    ({"return_token_ids": True}, lambda a: only(a)["token_ids"], said(5)),
    (IDS, lambda e: prompt_ids(map(only, e)) == only_first([2, 3, 4], e), True),
    (
        {"prompt": PROMPT * 3, "truncate_prompt_tokens": 2},
        lambda a: a["usage"]["prompt_tokens"],
        2,
    ),
]
OF_CHATS: Rows = [
    ({"logprobs": False}, logprobs, None),
    ({"logprobs": True}, num_top, [0] * 5),
    ({"logprobs": True, "top_logprobs": 0}, num_top, [0] * 5),
    ({"logprobs": True, "top_logprobs": 5}, num_top, [5] * 5),
    (
        CHOSEN | {"logprobs": True, "top_logprobs": 1},
        lambda a: {*num_top(a)} <= {3, 4},
        True,
    ),
    ({"n": 2}, lambda a: a["usage"]["prompt_tokens"], 3),
    ({"n": 2}, num_tokens, 10),
    # Fields may be null, and some have no effect.
    ({"model": None}, lambda a: a["model"], "model"),
    ({"user": "me", "metadata": {"a": "b"}}, num_tokens, 5),
    ({"temperature": None, "stop": None}, num_tokens, 5),
    # Ids and text of the prompt are outside `choices`.
    ({"return_token_ids": True}, lambda a: prompt_ids([a]), [[2, 3, 4]]),
    ({"return_token_ids": True}, lambda a: only(a)["token_ids"], said(5)),
    (IDS, lambda e: prompt_ids(e) == only_first([2, 3, 4], e), True),
    (IDS, lambda e: "prompt_token_ids" in only(e[0]), False),
    (
        {"return_prompt_text": True, "stream": True},
        lambda e: [one for one in e if "prompt_text" in one] == e[:1],
        True,
    ),
]
OF_BOTH: Rows = [
    # Logprobs of prompts: -1 returns the whole vocabulary.
    ({"prompt_logprobs": 0}, num_of_prompt, [1] * 2),
    ({"prompt_logprobs": 1}, lambda a: {*num_of_prompt(a)} <= {1, 2}, True),
    ({"prompt_logprobs": -1}, num_of_prompt, [VOCAB] * 2),
    (IDS, token_ids, said(5)),
    # Streams have no usage unless it is requested.
    ({"stream": True}, lambda e: any(one.get("usage") for one in e), False),
    *(({"seed": seed}, num_tokens, 5) for seed in (HUGE - 1, -HUGE, -1)),
]
# Requests with a mistake in the first of these fields. They are refused before a stream
# begins.
REFUSED_BY_BOTH: list[Fields] = [
    CHOSEN,
    *({"seed": seed} for seed in (HUGE, -HUGE - 1)),
    # Constraints that exclude each other.
    {"structured_outputs": {}, "response_format": {"type": "text"}},
    {"guided_regex": "a", "guided_choice": ["a"]},
]
REFUSED: dict[str, list[Fields]] = {
    COMPLETIONS: [
        *REFUSED_BY_BOTH,
        {"logprobs": 21},
        {"prompt_logprobs": -2},
        {"max_tokens": 0},
        {"min_tokens": 6},
        {"prompt": PROMPT * 40},
        {"prompt": [[2, 3], [99]]},
        {"priority": 2**31},
        {"n": 2, "temperature": 0},
        {"logit_bias": {"77": 1}},
        {"stop": ["#"] * 9000},
    ],
    CHAT: [
        *REFUSED_BY_BOTH,
        CHOSEN | {"logprobs": True, "use_beam_search": True},
        {"top_logprobs": 1},
        {"tools": 7, "tool_choice": "none"},
    ],
    RESPONSES: [
        {"temperature": 3},
        {"input": []},
        {"background": True, "store": False},
        {"request_id": "a/b"},
        {"use_beam_search": True},
    ],
}
# Requests with a mistake in a part of a field.
NO_SCHEMA = {"response_format": {"type": "json_schema"}}
REFUSED_PARTS: list[tuple[str, Fields, str]] = [
    *((path, NO_SCHEMA, "response_format.json_schema") for path in BOTH),
    (CHAT, {"tools": [{}], "tool_choice": "none"}, "tools.0.function"),
    (CHAT, {"tools": [{"function": {}}]}, "tools.0.function.name"),
    (CHAT, {"tools": [{"type": 1, "function": {"name": "f"}}]}, "tools.0.type"),
    (RESPONSES, {"include": ["logprobs"]}, "include.0"),
    (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text.format.type"),
    (RESPONSES, {"tools": [{"type": "function"}]}, "tools[0].name"),
]
ANSWERED = [(COMPLETIONS, *row) for row in OF_COMPLETIONS + OF_BOTH]
ANSWERED += [(CHAT, *row) for row in OF_CHATS + OF_BOTH]
MISTAKES = [(path, one, next(iter(one))) for path in REFUSED for one in REFUSED[path]]
MISTAKES += REFUSED_PARTS


def ids_of(rows: list[Any]) -> list[str]:
    return [f"{path} {str(fields)[:80]}" for path, fields, *_ in rows]


@pytest.mark.parametrize(
    ("path", "fields", "read", "expected"), ANSWERED, ids=ids_of(ANSWERED)
)
def test_response_meets_contract(
    http: Client, path: str, fields: Fields, read: Any, expected: Any
):
    assert read(http.ask(path, **BASE[path] | fields)) == expected


@pytest.mark.parametrize(("path", "fields", "param"), MISTAKES, ids=ids_of(MISTAKES))
def test_refuses_mistake_with_its_field(
    http: Client, path: str, fields: Fields, param: str
):
    for is_stream in (False, True):
        error = http.refusal(path, BASE[path] | fields | {"stream": is_stream})
        assert error["param"] == param
    # After a refusal, the server still generates.
    assert text(http.ask(COMPLETIONS, **BASE[COMPLETIONS])) == SAID


def test_refuses_fields_that_contradict_stream(http: Client):
    for path in BOTH:
        options = {"stream_options": {"include_usage": True}}
        assert http.refusal(path, BASE[path] | options)["param"] == "stream_options"
        fields = {"prompt_logprobs": 1, "stream": True}
        assert http.refusal(path, BASE[path] | fields)["param"] == "prompt_logprobs"
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
