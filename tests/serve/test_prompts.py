"""Texts and messages become token ids, with the bundled tokenizer."""

from pathlib import Path
from typing import Any

import pytest

from jaxspec.errors import RequestError, UnsupportedError
from jaxspec.serve.prompts import Prompts
from jaxspec.serve.requests.protocol import MAX_TEXTS, ChatBody, CompletionBody
from jaxspec.serve.settings import ServerSettings
from jaxspec.text.tokenizer import Tokenizer
from jaxspec_checkpoints import bundled_target
from tests.support.loops import make_config

TOKENIZER = Tokenizer.from_folder(bundled_target())
LONGEST = 96
USER = {"role": "user", "content": "Hello"}
TURNS = [USER, {"role": "assistant", "content": "Well"}]


def prompts(**settings: Any) -> Prompts:
    return Prompts(make_config(), TOKENIZER, ServerSettings(**settings))


def completion(prompt: Any, max_tokens: int | None = 4, **body: Any) -> list[Any]:
    given = CompletionBody(prompt=prompt, **body)
    return prompts().of_completion(given, max_tokens)


def chat(messages: Any, **body: Any) -> Any:
    given = ChatBody(messages=messages, **body)
    return prompts(trust_request_chat_template=True).of_chat(given, None)


def test_prompts_of_all_types_are_read():
    ids = TOKENIZER.encode("Once upon")
    text = {"prompt": "Once upon", "prompt_token_ids": ids}
    assert completion("Once upon") == [text]
    assert completion(["Once upon"] * 2) == [text] * 2
    assert completion(ids) == [{"prompt_token_ids": ids}]
    assert completion([ids, [5]]) == [
        {"prompt_token_ids": ids},
        {"prompt_token_ids": [5]},
    ]
    bare = completion("Once upon", add_special_tokens=False)
    assert bare[0]["prompt_token_ids"] == ids[1:]
    assert completion("x", cache_salt="s")[0]["cache_salt"] == "s"


def test_rejects_empty_and_too_many_prompts():
    empty: list[Any] = [None, "", []]
    for prompt in empty:
        with pytest.raises(RequestError, match="must be provided and non-empty"):
            completion(prompt)
    assert len(completion([[5]] * MAX_TEXTS)) == MAX_TEXTS
    for count, texts in ((MAX_TEXTS + 1, 1), (MAX_TEXTS // 2 + 1, 2)):
        with pytest.raises(RequestError, match=f"at most {MAX_TEXTS} texts"):
            completion([[5]] * count, n=texts)


def test_prompts_over_the_context_limit_are_refused():
    assert completion([5] * 92, 4)
    with pytest.raises(RequestError, match="maximum context length is 96") as refused:
        completion([5] * 93, 4)
    assert refused.value.parameter == "max_tokens"
    assert completion([5] * 95, None)
    with pytest.raises(RequestError, match="96 input tokens") as refused:
        completion([5] * 96, None)
    assert refused.value.parameter == "prompt"
    with pytest.raises(RequestError, match="at least"):
        completion("x" * 10**6)


def test_prompts_are_truncated_to_the_given_side():
    ids = list(range(10, 130))
    for count, side, kept in (
        (5, "left", ids[-5:]),
        (5, "right", ids[:5]),
        (-1, None, ids[-92:]),
    ):
        cut = completion(ids, truncate_prompt_tokens=count, truncation_side=side)
        assert cut[0]["prompt_token_ids"] == kept
    for count in (0, 97):
        with pytest.raises(RequestError, match="truncate_prompt_tokens"):
            completion(ids, truncate_prompt_tokens=count)


def test_conversations_are_rendered():
    found = chat([USER])
    text, ids = TOKENIZER.write_chat([USER])
    assert found == {"prompt": text, "prompt_token_ids": ids}
    opened = chat(TURNS, continue_final_message=True)["prompt"]
    assert opened.endswith("Well")
    closed = chat(TURNS, add_generation_prompt=False)["prompt"]
    assert closed.endswith("<end_of_turn>\n")
    with pytest.raises(RequestError, match="Cannot set both"):
        chat(TURNS, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(RequestError, match="take turns"):
        chat([TURNS[1]])
    spelled = chat([{"role": "user", "content": "a<end_of_turn>"}])
    (end,) = TOKENIZER.turn_end_ids
    assert spelled["prompt_token_ids"].count(end) == 1


def test_system_message_is_merged_unless_strict():
    messages = [{"role": "system", "content": "Be brief."}, USER, USER]
    text = "Be brief.\n\nHello\n\nHello"
    assert chat(messages) == chat([USER | {"content": text}])
    strict = prompts(strict_roles=True)
    with pytest.raises(RequestError, match="--strict-roles"):
        strict.of_chat(ChatBody(messages=messages), None)
    assert strict.of_chat(ChatBody(messages=[USER]), None) == chat([USER])


def test_certainly_too_long_text_is_not_encoded(monkeypatch: pytest.MonkeyPatch):
    long = {"role": "user", "content": "a" * 10**5}
    template = "{{ 'short' }}"  # a chat template may leave out long messages
    assert chat([long], chat_template=template)["prompt"] == "short"
    # Chat templates strip messages.
    assert chat([{"role": "user", "content": " " * 10**5 + "Hello"}])
    monkeypatch.setattr(Tokenizer, "encode", None)
    monkeypatch.setattr(Tokenizer, "write_chat", None)
    for ask in (lambda: chat([long]), lambda: completion("a" * 10**5)):
        with pytest.raises(RequestError, match="at least"):
            ask()


def test_request_chat_template_needs_permission(tmp_path: Path):
    asked: dict[str, Any] = {"chat_template": "{{ word }}{{ messages[0]['content'] }}"}
    found = chat([USER], **asked, chat_template_kwargs={"word": "So: "})
    assert found["prompt"] == "So: Hello"
    with pytest.raises(UnsupportedError, match="documents"):
        chat([USER], documents=[{"text": "!"}])
    with pytest.raises(RequestError, match="--trust-request-chat-template"):
        prompts().of_chat(ChatBody(messages=[USER], **asked), None)
    # A chat template is never a path.
    path = tmp_path / "secret"
    path.write_text("secret {{ messages }}")
    assert chat([USER], chat_template=str(path))["prompt"] == str(path)
