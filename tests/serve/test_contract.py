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
COUNTS = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
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


# Requests, functions of their responses or of the events of their streams, and the
# expected values.
ANSWERED: list[tuple[str, Fields, Any, Any]] = [
    # Logprobs of completions: only the token's own, several.
    (COMPLETIONS, {"logprobs": 0}, num_top, [1] * 5),
    (COMPLETIONS, {"logprobs": 5}, lambda a: {*num_top(a)} <= {5, 6}, True),
    (COMPLETIONS, {"logprobs": 1}, lambda a: logprobs(a)["text_offset"], [*range(5)]),
    (
        COMPLETIONS,
        {"logprobs": 1},
        lambda a: max(logprobs(a)["token_logprobs"]) < 0,
        True,
    ),
    (
        COMPLETIONS,
        CHOSEN | {"logprobs": 1, "return_tokens_as_token_ids": True},
        has_chosen,
        True,
    ),
    # Logprobs of prompts: -1 returns the whole vocabulary.
    *(
        (
            path,
            {"prompt_logprobs": count},
            lambda a, b=b: b >= {*num_of_prompt(a)},
            True,
        )
        for path in BOTH
        for count, b in ((0, {1}), (1, {1, 2}), (-1, {VOCAB}))
    ),
    # The first echoed token has no logprobs.
    (COMPLETIONS, {"echo": True, "logprobs": 1}, first_logprobs, [None, None]),
    # Logprobs of chats.
    (CHAT, {"logprobs": False}, logprobs, None),
    (CHAT, {"logprobs": True}, num_top, [0] * 5),
    (CHAT, {"logprobs": True, "top_logprobs": 0}, num_top, [0] * 5),
    (CHAT, {"logprobs": True, "top_logprobs": 5}, num_top, [5] * 5),
    (
        CHAT,
        CHOSEN | {"logprobs": True, "top_logprobs": 1},
        lambda a: {*num_top(a)} <= {3, 4},
        True,
    ),
    # Several texts.
    (
        CHAT,
        {"n": 2},
        lambda a: a["usage"],
        COUNTS | {"completion_tokens": 10, "total_tokens": 13},
    ),
    # Lengths and ends of texts.
    (COMPLETIONS, {"max_tokens": None}, num_tokens, 93),
    (COMPLETIONS, {"stop": SAID[3]}, ended, (SAID[:3], "stop", SAID[3])),
    (
        COMPLETIONS,
        {"stop": [SAID[3]], "include_stop_str_in_output": True},
        text,
        SAID[:4],
    ),
    (
        COMPLETIONS,
        {"stop_token_ids": [said(4)[3]]},
        ended,
        (SAID[:3], "stop", said(4)[3]),
    ),
    # Streams have no usage unless it is requested.
    *(
        (path, {"stream": True}, lambda e: any(one.get("usage") for one in e), False)
        for path in BOTH
    ),
    # Values at the limits.
    *(
        (path, {"seed": seed}, num_tokens, 5)
        for path in BOTH
        for seed in (HUGE - 1, -HUGE, -1)
    ),
    *(
        (COMPLETIONS, {name: value}, num_tokens, 5)
        for name, value in (
            *(("top_k", -1), ("top_k", 0), ("top_p", 1), ("min_p", 1)),
            *(("temperature", 2), ("presence_penalty", -2)),
        )
    ),
    (COMPLETIONS, {"truncate_prompt_tokens": 1}, num_tokens, 5),
    (COMPLETIONS, {"n": 128}, lambda a: len(a["choices"]), 128),
    # Fields may be null, and some have no effect.
    (CHAT, {"model": None}, lambda a: a["model"], "model"),
    (CHAT, {"user": "me", "metadata": {"a": "b"}}, num_tokens, 5),
    (CHAT, {"temperature": None, "stop": None}, num_tokens, 5),
    # Ids and text of the prompt are in the first event of a stream, of chats outside
    # `choices`.
    (
        COMPLETIONS,
        {"return_token_ids": True},
        lambda a: (only(a)["prompt_token_ids"], only(a)["token_ids"]),
        ([2, 3, 4], said(5)),
    ),
    (
        CHAT,
        {"return_token_ids": True},
        lambda a: (a["prompt_token_ids"], only(a)["token_ids"]),
        ([2, 3, 4], said(5)),
    ),
    *(
        (path, {"return_token_ids": True, "stream": True}, token_ids, said(5))
        for path in BOTH
    ),
    (
        COMPLETIONS,
        {"return_token_ids": True, "stream": True},
        lambda e: prompt_ids(map(only, e)) == [[2, 3, 4], *[None] * len(e[1:])],
        True,
    ),
    (
        CHAT,
        {"return_token_ids": True, "return_prompt_text": True, "stream": True},
        lambda e: (
            prompt_ids(e) == [[2, 3, 4], *[None] * len(e[1:])]
            and [one for one in e if "prompt_text" in one] == e[:1]
            and "prompt_token_ids" not in only(e[0])
        ),
        True,
    ),
    (
        COMPLETIONS,
        {"prompt": PROMPT * 3, "truncate_prompt_tokens": 2},
        lambda a: a["usage"]["prompt_tokens"],
        2,
    ),
]
# Requests with a mistake in the first of these fields. They are refused before a stream
# begins.
REFUSED: list[tuple[str, Fields]] = [
    (COMPLETIONS, CHOSEN),
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
    (CHAT, CHOSEN),
    (CHAT, CHOSEN | {"logprobs": True, "use_beam_search": True}),
    (CHAT, {"top_logprobs": 1}),
    *((path, {"seed": seed}) for path in BOTH for seed in (HUGE, -HUGE - 1)),
    # Constraints that exclude each other.
    *(
        (path, fields)
        for path in BOTH
        for fields in (
            {"response_format": {"type": "json_schema"}},
            {"structured_outputs": {}, "response_format": {"type": "text"}},
            {"guided_choice": ["a"], "guided_regex": "a"},
        )
    ),
    (CHAT, {"tools": 7, "tool_choice": "none"}),
    (RESPONSES, {"temperature": 3}),
    (RESPONSES, {"input": []}),
    (RESPONSES, {"background": True, "store": False}),
    (RESPONSES, {"request_id": "a/b"}),
    (RESPONSES, {"use_beam_search": True}),
]
# Requests with a mistake in a part of a field.
REFUSED_PARTS: list[tuple[str, Fields, str]] = [
    (CHAT, {"tools": [{}], "tool_choice": "none"}, "tools.0.function"),
    (CHAT, {"tools": [{"function": {}}]}, "tools.0.function.name"),
    (CHAT, {"tools": [{"type": 1, "function": {"name": "f"}}]}, "tools.0.type"),
    (RESPONSES, {"include": ["logprobs"]}, "include.0"),
    (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text.format.type"),
    (RESPONSES, {"tools": [{"type": "function"}]}, "tools[0].name"),
]
MISTAKES = [(path, one, next(iter(one))) for path, one in REFUSED] + REFUSED_PARTS


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
