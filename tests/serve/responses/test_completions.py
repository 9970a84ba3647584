"""Fields of completions beside the text: echo, logprobs, token ids, also in chunks.

Also tests `response_writers`, which completions and chats share.
"""

import asyncio
from typing import Any

import pytest

from jaxspec.sampling_params import SamplingParams
from jaxspec.serve.requests.protocol import CompletionBody
from jaxspec.serve.responses.completions import CompletionWriter
from tests.support.fake_engines import letters, said
from tests.support.serving import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    PROMPT,
    Client,
    StubServing,
    server,
)
from tests.support.tool_chats import TOKENIZER, Stage


@pytest.mark.parametrize("is_stream", [False, True])
def test_echoes_prompt_once(slow_http: Client, is_stream: bool):
    asked = {"max_tokens": 12, "echo": True, "n": 2, "stream": is_stream}
    for prompt in (PROMPT, [2, 3, 4]):
        found = slow_http.ask(COMPLETIONS, prompt=prompt, **asked)
        texts = ["", ""]
        for chunk in found if is_stream else [found]:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == [PROMPT + letters(said(12))] * 2


def test_stream_without_outputs_ends_with_the_usage():
    options: Any = {"include_usage": True}
    body = CompletionBody(prompt=PROMPT, stream=True, stream_options=options)
    writer = CompletionWriter(StubServing(), body, SamplingParams(), "x")

    async def written() -> list[dict[str, Any]]:
        async def nothing() -> Any:
            for one in ():
                yield one

        return [chunk async for chunk in writer.chunks(nothing())]

    (chunk,) = asyncio.run(written())
    assert chunk["usage"]["total_tokens"] == 0


def test_offsets_are_lengths_of_the_returned_text(stage: Stage):
    """Includes bytes of a character and hidden tokens, which have other texts alone."""
    prompt, text = "Cr\u00e8me \U0001f600 fox", " \u00e9t\u00e9<bos> \U0001f9a9 end"
    stage.script.say(f"{text}STOP")  # cut off from the text
    asked: dict[str, Any] = {"prompt": prompt, "stop": "STOP", "max_tokens": 60}
    asked |= {"logprobs": 0, "echo": True, "return_token_ids": True}
    found: dict[str, list[Any]] = stage.http.ask(COMPLETIONS, **asked)["choices"][0]
    chunks = stage.http.ask(COMPLETIONS, **asked, stream=True)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(one["text"] for one in choices) == found["text"]
    logprobs: Any = found["logprobs"]
    for name, values in logprobs.items():
        assert [one for c in choices for one in c["logprobs"][name]] == values
    # The first token has no logprob; with 0, others have only their own.
    tops = [list(one) for one in logprobs["top_logprobs"][1:]]
    assert tops == [[token] for token in logprobs["tokens"][1:]]
    assert logprobs["top_logprobs"][0] is logprobs["token_logprobs"][0] is None
    whole, offsets = found["text"], logprobs["text_offset"]
    assert whole == prompt + text.replace("<bos>", "")
    tokens = [*found["prompt_token_ids"], *found["token_ids"]]
    assert len(offsets) == len(tokens)
    assert TOKENIZER.bos_token_id in found["token_ids"]
    assert offsets[:2] == [0, 0], "a hidden first token has no length"
    assert offsets == sorted(offsets)
    for token, offset, end in zip(
        tokens, offsets, [*offsets[1:], len(whole)], strict=True
    ):
        if TOKENIZER.is_special(token):
            assert offset == end
        elif not TOKENIZER.is_byte(token) and offset < len(whole):
            assert whole[offset:end] == TOKENIZER.decode([token])
    # All four byte tokens of a character have the character's offset.
    emoji = prompt.index("\U0001f600")
    assert offsets.count(emoji) == 4
    assert offsets.count(emoji + 1) == 1


def test_tokens_as_ids():
    """The server sets the default, and a request may override it."""
    given: Any = {"prompt": PROMPT, "max_tokens": 2, "logprobs": 1}
    with server(return_tokens_as_token_ids=True) as http:
        for asked, is_id in ((None, True), (True, True), (False, False)):
            given["return_tokens_as_token_ids"] = asked
            answer = http.ask(COMPLETIONS, **given)
            tokens = answer["choices"][0]["logprobs"]["tokens"]
            ids = [f"token_id:{token}" for token in said(2)]
            assert tokens == (ids if is_id else list(letters(said(2))))


def test_final_message_is_continued(http: Client):
    turns = [{"role": "user", "content": "!"}, {"role": "assistant", "content": PROMPT}]
    asked: dict[str, Any] = {"messages": turns, "max_tokens": 5}
    asked |= {"continue_final_message": True, "add_generation_prompt": False}
    for echo in (False, True):
        expected = (PROMPT if echo else "") + letters(said(5))
        message = http.ask(CHAT, **asked, echo=echo)["choices"][0]["message"]
        assert (message["role"], message["content"]) == ("assistant", expected)
        chunks = http.ask(CHAT, **asked, echo=echo, stream=True)
        deltas = [one["choices"][0]["delta"] for one in chunks]
        assert deltas[0]["role"] == "assistant"
        assert "".join(delta["content"] for delta in deltas) == expected


def test_every_text_begins_with_role(slow_http: Client):
    asked: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 5}
    chunks = slow_http.ask(CHAT, **asked, n=3, stream=True)
    choices = [one["choices"][0] for one in chunks]
    begun = [one["index"] for one in choices if "role" in one["delta"]]
    assert sorted(begun) == [0, 1, 2]
    for index in range(3):
        own = [one["delta"] for one in choices if one["index"] == index]
        assert "role" in own[0]
        assert "".join(one["content"] for one in own) == letters(said(5))


def test_all_logprobs_and_role_are_returned():
    asked = {"messages": MESSAGES, "max_tokens": 2, "logprobs": True}
    asked |= {"top_logprobs": -1}
    with server({"max_logprobs": 16}, response_role="model") as http:
        (choice,) = http.ask(CHAT, **asked)["choices"]
        assert choice["message"]["role"] == "model"
        for one in choice["logprobs"]["content"]:
            values = [other["logprob"] for other in one["top_logprobs"]]
            assert len(values) == 16
            assert values == sorted(values, reverse=True)
    with server({"max_logprobs": 5}) as http:
        assert "at most 5" in http.refusal(CHAT, asked)["message"]
