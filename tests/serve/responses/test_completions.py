"""Fields of completions beside the text: echo, logprobs, token ids, also in chunks.

Also tests `response_writers`, which completions and chats share.
"""

from typing import Any

import httpx
import pytest

from jaxspec.engine.detokenizer import TextStream
from jaxspec.logprobs import Logprob
from jaxspec.outputs import CompletionOutput, RequestOutput
from jaxspec.sampling_params import SamplingParams
from jaxspec.serve.requests.protocol import CompletionBody
from jaxspec.serve.responses.completions import CompletionWriter
from jaxspec.text.tokenizer import Tokenizer
from jaxspec_checkpoints import bundled_target
from tests.serve.responses.test_usage import StubServing
from tests.support.fake_engines import letters, said
from tests.support.serving import COMPLETIONS, PROMPT, post, serve_http


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("prompt", [PROMPT, [2, 3, 4]])
def test_echoes_prompt_once(prompt: Any, is_stream: bool):
    async def ask(client: httpx.AsyncClient) -> None:
        asked = {"prompt": prompt, "max_tokens": 12, "echo": True, "n": 2}
        found = await post(client, COMPLETIONS, **asked, stream=is_stream)
        texts = ["", ""]
        for chunk in found if is_stream else [found]:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == [PROMPT + letters(said(12))] * 2

    serve_http(ask, delay_s=0.004)


@pytest.mark.parametrize("is_stream", [False, True])
def test_echo_without_generation(is_stream: bool):
    async def ask(client: httpx.AsyncClient) -> None:
        asked = {"prompt": PROMPT, "max_tokens": 0, "echo": True}
        found = await post(client, COMPLETIONS, **asked, stream=is_stream)
        (answer,) = found if is_stream else [found]
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
        if not is_stream:
            assert answer["usage"]["completion_tokens"] == 0
        response = await client.post(
            COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 0}
        )
        assert response.status_code == 400, "max_tokens=0 without an echo"

    serve_http(ask)


def test_stop_reasons():
    async def ask(client: httpx.AsyncClient) -> None:
        tokens = said(6)
        cases = [
            ({"stop": letters(tokens[3:5])}, letters(tokens[:3]), letters(tokens[3:5])),
            ({"stop_token_ids": [tokens[4]]}, letters(tokens[:4]), tokens[4]),
        ]
        for given, text, reason in cases:
            answer = await post(client, COMPLETIONS, prompt=PROMPT, **given)
            (choice,) = answer["choices"]
            assert (choice["text"], choice["stop_reason"]) == (text, reason)
            assert choice["finish_reason"] == "stop"

    serve_http(ask)


@pytest.mark.parametrize("is_stream", [False, True])
def test_token_ids(is_stream: bool):
    async def ask(client: httpx.AsyncClient) -> None:
        asked = {"prompt": PROMPT, "max_tokens": 12, "return_token_ids": True}
        found = await post(client, COMPLETIONS, **asked, stream=is_stream)
        choices = [
            c for one in (found if is_stream else [found]) for c in one["choices"]
        ]
        assert [token for one in choices for token in one["token_ids"]] == said(12)
        prompts = [one.get("prompt_token_ids") for one in choices]
        assert prompts == [[2, 3, 4]] + [None] * (len(choices) - 1)

    serve_http(ask, delay_s=0.004)


def output(tokens: list[int], *, is_first: bool, is_last: bool) -> RequestOutput:
    """Make part of a text; the log-probability of each token is its negative id."""
    logprobs = [
        {token: Logprob(-float(token), 1, letters([token]))} for token in tokens
    ]
    completion = CompletionOutput(
        index=0,
        text=letters(tokens),
        token_ids=tokens,
        logprobs=logprobs,
        finish_reason="length" if is_last else None,
    )
    return RequestOutput(
        request_id="x",
        prompt=PROMPT,
        prompt_token_ids=[2, 3, 4],
        prompt_logprobs=[None, *({t: Logprob(-float(t), 1)} for t in (3, 4))]
        if is_first
        else None,
        outputs=[completion],
        finished=is_last,
    )


def test_echo_logprobs_in_chunks():
    body = CompletionBody(prompt=PROMPT, logprobs=1, echo=True, stream=True)
    params = SamplingParams(logprobs=1, prompt_logprobs=1)
    writer = CompletionWriter(StubServing(), body, params, "x")
    first = output([5, 6], is_first=True, is_last=False)
    second = output([7], is_first=False, is_last=True)
    choices = []
    for one in (first, second):
        for completion, index in writer._texts(0, one):
            choices += writer.deltas(index, completion, one)
    both = [choice["logprobs"] for choice in choices]
    text = PROMPT + letters([5, 6, 7])
    assert [x for one in both for x in one["tokens"]] == list(text)
    offsets = [x for one in both for x in one["text_offset"]]
    assert offsets == list(range(6)), "each token is one character"
    own = [x for one in both for x in one["token_logprobs"]]
    assert own == [None, -3, -4, -5, -6, -7]
    assert both[1]["top_logprobs"] == [{letters([7]): -7}]
    assert choices[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("is_stream", [False, True])
def test_offsets_are_lengths_of_the_returned_text(is_stream: bool):
    """Includes bytes of a character and hidden tokens, which have other texts alone."""
    serving: Any = StubServing()
    tokenizer = serving.tokenizer = Tokenizer.from_folder(bundled_target())
    prompt, text = "Cr\u00e8me \U0001f600 fox", " \u00e9t\u00e9 \U0001f9a9 end"
    prompt_ids = tokenizer.encode(prompt)
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids.insert(3, tokenizer.bos_token_id)  # hidden in the text
    stop = tokenizer.encode("STOP", add_special_tokens=False)  # cut off from the text
    body = CompletionBody(prompt=prompt, logprobs=0, echo=True, stream=is_stream)
    params = SamplingParams(logprobs=0, prompt_logprobs=0, stop="STOP")
    writer = CompletionWriter(serving, body, params, "x")
    parts = [(ids, text)]
    if is_stream:
        growing = TextStream(tokenizer, SamplingParams())
        parts = [([token], growing.follow([token])) for token in ids]
    choices = []
    for part, new in (*parts, (stop, "")):
        is_last = part is stop
        completion = CompletionOutput(
            index=0,
            text=new,
            token_ids=part,
            logprobs=[{token: Logprob(-1.0, 1)} for token in part],
            finish_reason="stop" if is_last else None,
        )
        found = RequestOutput(
            request_id="x",
            prompt=prompt,
            prompt_token_ids=prompt_ids,
            prompt_logprobs=[None, *({t: Logprob(-1.0, 1)} for t in prompt_ids[1:])],
            outputs=[completion],
            finished=is_last,
        )
        for one, index in writer._texts(0, found):
            choices += writer.deltas(index, one, found)
    whole = "".join(one["text"] for one in choices)
    assert whole == prompt + text
    offsets = [at for one in choices for at in one["logprobs"]["text_offset"]]
    tokens = [*prompt_ids, *ids, *stop]
    assert len(offsets) == len(tokens)
    assert offsets[:2] == [0, 0], "a hidden first token has no length"
    assert offsets == sorted(offsets)
    for place, (token, offset) in enumerate(zip(tokens, offsets, strict=True)):
        following = [*offsets[place + 1 :], len(whole)][0]
        shown = whole[offset:following]
        if tokenizer.is_special(token):
            assert shown == ""
        elif not tokenizer.is_byte(token) and offset < len(whole):
            assert shown == tokenizer.decode([token])
    # All four byte tokens of a character have the character's offset.
    emoji = prompt.index("\U0001f600")
    assert offsets.count(emoji) == 4
    assert offsets.count(emoji + 1) == 1


def test_tokens_as_ids():
    """The server sets the default, and a request may override it."""

    async def ask(client: httpx.AsyncClient) -> None:
        given: Any = {"prompt": PROMPT, "max_tokens": 2, "logprobs": 1}
        for asked, is_id in ((None, True), (True, True), (False, False)):
            answer = await post(
                client, COMPLETIONS, **given, return_tokens_as_token_ids=asked
            )
            tokens = answer["choices"][0]["logprobs"]["tokens"]
            ids = [f"token_id:{token}" for token in said(2)]
            assert tokens == (ids if is_id else list(letters(said(2))))

    serve_http(ask, settings={"return_tokens_as_token_ids": True})
