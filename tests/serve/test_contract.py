"""The contract with clients of vLLM, as a table of requests and expected responses.

The table follows vLLM's own tests of its OpenAI server, except those that need a large
model or that other tests here cover. All requests go to one server.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from tests.support.fake_engines import letters, said
from tests.support.serving import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    PROMPT,
    Site,
    error_of,
    events_of,
    site_of,
)

VOCAB = 16
Holds = Callable[[Any], object]


class Case(NamedTuple):
    """A request and a condition on its response.

    Attributes:
        holds: Condition on the response, or on a stream's events.
        param: Field at fault if the request must be refused; None otherwise.
    """

    path: str
    body: dict[str, Any]
    holds: Holds | None = None
    param: str | None = None

    def __str__(self) -> str:
        fields = {key: value for key, value in self.body.items() if key != "messages"}
        return f"{self.path} {fields}"


def text(**body: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 5} | body


def chat(**body: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "max_tokens": 5} | body


def only(answer: Any) -> Any:
    (choice,) = answer["choices"]
    return choice


def logprobs_of(answer: Any) -> Any:
    return only(answer)["logprobs"]


def top(answer: Any) -> list[int]:
    """Return the number of top logprobs that each token of a chat response has."""
    return [len(entry["top_logprobs"]) for entry in logprobs_of(answer)["content"]]


def joined(events: list[Any]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for choice in choices
    )


def usages(events: list[Any]) -> list[Any]:
    return [event.get("usage") for event in events]


SAID = letters(said(5))
COUNTS = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
HUGE = 2**63
CHOSEN = [13, 2, 15]

CASES = [
    # Logprobs of completions: none, only the token's own, several, too many.
    Case(COMPLETIONS, text(), lambda a: logprobs_of(a) is None),
    Case(
        COMPLETIONS,
        text(logprobs=0),
        lambda a: [len(one) for one in logprobs_of(a)["top_logprobs"]] == [1] * 5,
    ),
    Case(
        COMPLETIONS,
        text(logprobs=5),
        lambda a: all(5 <= len(one) <= 6 for one in logprobs_of(a)["top_logprobs"]),
    ),
    Case(
        COMPLETIONS,
        text(logprobs=1),
        lambda a: (
            logprobs_of(a)["tokens"] == list(SAID)
            and logprobs_of(a)["text_offset"] == list(range(5))
            and all(one < 0 for one in logprobs_of(a)["token_logprobs"])
        ),
    ),
    Case(
        COMPLETIONS,
        text(logprobs=1, logprob_token_ids=CHOSEN, return_tokens_as_token_ids=True),
        lambda a: all(
            set(one) == {own, *(f"token_id:{token}" for token in CHOSEN)}
            for own, one in zip(
                logprobs_of(a)["tokens"], logprobs_of(a)["top_logprobs"], strict=True
            )
        ),
    ),
    Case(COMPLETIONS, text(logprob_token_ids=CHOSEN), param="logprob_token_ids"),
    Case(COMPLETIONS, text(logprobs=21), param="logprobs"),
    Case(COMPLETIONS, text(logprobs=21, stream=True), param="logprobs"),
    # After a refusal, the server still generates.
    Case(COMPLETIONS, text(), lambda a: only(a)["text"] == SAID),
    # Logprobs of prompts: the first token has none; -1 returns the whole vocabulary.
    *(
        Case(
            path,
            make(prompt_logprobs=count),
            lambda a, low=low, high=high, find=find: (
                find(a)[0] is None
                and all(low <= len(one) <= high for one in find(a)[1:])
            ),
        )
        for path, make, find in (
            (COMPLETIONS, text, lambda a: only(a)["prompt_logprobs"]),
            (CHAT, chat, lambda a: a["prompt_logprobs"]),
        )
        for count, low, high in ((0, 1, 1), (1, 1, 2), (-1, VOCAB, VOCAB))
    ),
    Case(COMPLETIONS, text(prompt_logprobs=1, stream=True), param="prompt_logprobs"),
    Case(COMPLETIONS, text(prompt_logprobs=-2), param="prompt_logprobs"),
    # Echoed tokens have logprobs like generated ones.
    Case(
        COMPLETIONS,
        text(echo=True, logprobs=1),
        lambda a: (
            only(a)["text"] == PROMPT + SAID
            and len(logprobs_of(a)["tokens"])
            == len(logprobs_of(a)["token_logprobs"])
            == 8
            and logprobs_of(a)["token_logprobs"][0]
            is logprobs_of(a)["top_logprobs"][0]
            is None
        ),
    ),
    # Logprobs of chats.
    Case(CHAT, chat(), lambda a: logprobs_of(a) is None),
    Case(CHAT, chat(logprobs=False), lambda a: logprobs_of(a) is None),
    Case(CHAT, chat(logprobs=True), lambda a: top(a) == [0] * 5),
    Case(CHAT, chat(logprobs=True, top_logprobs=0), lambda a: top(a) == [0] * 5),
    Case(CHAT, chat(logprobs=True, top_logprobs=5), lambda a: top(a) == [5] * 5),
    Case(
        CHAT,
        chat(logprobs=True, top_logprobs=1, logprob_token_ids=CHOSEN),
        lambda a: all(3 <= count <= 4 for count in top(a)),
    ),
    Case(CHAT, chat(logprob_token_ids=CHOSEN), param="logprob_token_ids"),
    Case(
        CHAT,
        chat(logprobs=True, logprob_token_ids=CHOSEN, use_beam_search=True),
        param="logprob_token_ids",
    ),
    Case(CHAT, chat(logprobs=True, top_logprobs=21), param="logprobs"),
    Case(CHAT, chat(top_logprobs=1), param="top_logprobs"),
    # Several prompts and texts.
    Case(
        COMPLETIONS,
        text(prompt=[PROMPT, PROMPT]),
        lambda a: [one["text"] for one in a["choices"]] == [SAID] * 2,
    ),
    Case(
        COMPLETIONS,
        text(prompt=[[2, 3, 4], [2, 3]], n=2),
        lambda a: [one["index"] for one in a["choices"]] == [0, 1, 2, 3],
    ),
    Case(CHAT, chat(n=3), lambda a: len(a["choices"]) == 3),
    Case(
        CHAT,
        chat(n=2),
        lambda a: a["usage"] == COUNTS | {"completion_tokens": 10, "total_tokens": 13},
    ),
    # Lengths and ends of texts.
    Case(CHAT, chat(max_completion_tokens=2), lambda a: length(a) == 2),
    Case(COMPLETIONS, {"prompt": PROMPT}, lambda a: length(a) == 16),
    Case(COMPLETIONS, text(max_tokens=None), lambda a: length(a) == 93),
    Case(COMPLETIONS, text(max_tokens=0), param="max_tokens"),
    Case(COMPLETIONS, text(max_tokens=94), param="max_tokens"),
    Case(COMPLETIONS, text(min_tokens=6), param="min_tokens"),
    Case(
        COMPLETIONS,
        text(stop=SAID[3]),
        lambda a: (
            only(a)["text"] == SAID[:3]
            and only(a)["finish_reason"] == "stop"
            and only(a)["stop_reason"] == SAID[3]
        ),
    ),
    Case(
        COMPLETIONS,
        text(stop=[SAID[3]], include_stop_str_in_output=True),
        lambda a: only(a)["text"] == SAID[:4],
    ),
    Case(
        COMPLETIONS,
        text(stop_token_ids=[said(4)[3]]),
        lambda a: only(a)["stop_reason"] == said(4)[3],
    ),
    # Streams.
    Case(COMPLETIONS, text(stream=True), lambda e: joined(e) == SAID),
    Case(COMPLETIONS, text(stream=True), lambda e: not any(usages(e))),
    Case(
        COMPLETIONS,
        text(stream=True),
        lambda e: (
            [one["choices"][0]["finish_reason"] for one in e]
            == [None] * (len(e) - 1) + ["length"]
        ),
    ),
    Case(
        CHAT,
        chat(stream=True, n=2),
        lambda e: (
            sorted(
                choice["index"]
                for one in e
                for choice in one["choices"]
                if choice["delta"].get("role") == "assistant"
            )
            == [0, 1]
        ),
    ),
    *(
        Case(
            path,
            make(stream=True, stream_options={"include_usage": True} | more),
            lambda e, is_each=bool(more): (
                e[-1]["choices"] == []
                and e[-1]["usage"] == COUNTS
                and all(one is not None for one in usages(e)[:-1]) == is_each
            ),
        )
        for path, make in ((COMPLETIONS, text), (CHAT, chat))
        for more in ({}, {"continuous_usage_stats": True})
    ),
    *(
        Case(path, make(stream_options={"include_usage": True}), param="stream_options")
        for path, make in ((COMPLETIONS, text), (CHAT, chat))
    ),
    # Values at the limits.
    *(
        Case(path, make(seed=seed), param=None if is_right else "seed")
        for path, make in ((COMPLETIONS, text), (CHAT, chat))
        for seed, is_right in (
            *((HUGE - 1, True), (-HUGE, True), (-1, True)),
            *((HUGE, False), (-HUGE - 1, False)),
        )
    ),
    *(
        Case(COMPLETIONS, text(**{name: value}), param=None if is_right else name)
        for name, value, is_right in (
            *(("top_k", -1, True), ("top_k", 0, True), ("top_k", -2, False)),
            *(("top_p", 1, True), ("top_p", 0, False), ("min_p", 1, True)),
            *(("temperature", 2, True), ("temperature", 2.01, False)),
            *(("presence_penalty", -2, True), ("presence_penalty", 2.01, False)),
            *(
                ("truncate_prompt_tokens", 1, True),
                ("truncate_prompt_tokens", 0, False),
            ),
            *(("n", 128, True), ("n", 0, False)),
        )
    ),
    # Unknown fields are allowed, and fields may be missing.
    Case(CHAT, chat(extra_field="x"), lambda a: length(a) == 5),
    Case(CHAT, chat(model=None), lambda a: a["model"] == "model"),
    Case(CHAT, chat(user="me", metadata={"a": "b"}), lambda a: length(a) == 5),
    Case(CHAT, chat(temperature=None, stop=None), lambda a: length(a) == 5),
    # Texts and ids of the prompt in the response.
    Case(
        COMPLETIONS,
        text(return_token_ids=True),
        lambda a: (
            only(a)["prompt_token_ids"] == [2, 3, 4] and only(a)["token_ids"] == said(5)
        ),
    ),
    Case(
        CHAT,
        chat(return_token_ids=True, return_prompt_text=True, stream=True),
        lambda e: (
            # The prompt's ids and text are sent once, in the first event, outside
            # `choices`.
            [one.get("prompt_token_ids") for one in e]
            == [[2, 3, 4], *[None] * len(e[1:])]
            and [one for one in e if "prompt_text" in one] == e[:1]
            and "prompt_token_ids" not in e[0]["choices"][0]
            and sum((one["choices"][0].get("token_ids") or [] for one in e), [])
            == said(5)
        ),
    ),
    Case(
        COMPLETIONS,
        text(prompt=PROMPT * 3, truncate_prompt_tokens=2),
        lambda a: a["usage"]["prompt_tokens"] == 2,
    ),
]


def length(answer: Any) -> int:
    return answer["usage"]["completion_tokens"]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with site_of() as made:
        yield made


@pytest.mark.parametrize("case", CASES, ids=str)
def test_response_meets_contract(site: Site, case: Case):
    with httpx.Client(base_url=site.url, timeout=30) as client:
        response = client.post(case.path, json=case.body)
    if case.param is not None:
        assert error_of(response, 400, "BadRequestError")["param"] == case.param
        return
    assert response.status_code == 200, response.text
    is_stream = case.body.get("stream")
    answer = events_of(response.text) if is_stream else response.json()
    if case.holds is not None:
        assert case.holds(answer), answer


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
def test_status_by_content_type(site: Site, kind: str, status: int):
    body = b'{"prompt": "%s"}' % PROMPT.encode()
    with httpx.Client(base_url=site.url, timeout=30) as client:
        head = {"content-type": kind}
        response = client.post(COMPLETIONS, content=body, headers=head)
    assert response.status_code == status
