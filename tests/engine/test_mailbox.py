"""What was not fetched is merged as its kind wants; ends and errors arrive."""

import asyncio
from typing import Any

import pytest

from jaxspec.engine.mailbox import Mailbox
from jaxspec.outputs import CompletionOutput, RequestOutput
from jaxspec.sampling_params import RequestOutputKind

DELTA, CUMULATIVE = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE


def output_of(text: str, reason: str | None = None, **changes: Any) -> RequestOutput:
    tokens = [ord(letter) for letter in text]
    completion = CompletionOutput(
        index=0, text=text, token_ids=tokens, finish_reason=reason
    )
    return RequestOutput(
        request_id="a",
        prompt="p",
        prompt_token_ids=[1],
        outputs=[completion],
        finished=reason is not None,
        **changes,
    )


def fetch(kind: RequestOutputKind, use: Any, num_texts: int = 1) -> Any:
    async def run() -> Any:
        return await use(Mailbox("a", kind, num_texts))

    return asyncio.run(asyncio.wait_for(run(), 10))


@pytest.mark.parametrize(("kind", "text"), [(DELTA, "abc"), (CUMULATIVE, "bc")])
def test_a_slow_reader_gets_one_output(kind, text):
    async def use(mailbox: Mailbox) -> None:
        mailbox.put(output_of("a"))
        mailbox.put(output_of("bc"))
        output = await mailbox.get()
        assert output.outputs[0].text == text
        assert list(output.outputs[0].token_ids) == [ord(one) for one in text]
        # It is the caller's now: what comes later is another one.
        mailbox.put(output_of("d", "length"))
        assert output.outputs[0].text == text
        last = await mailbox.get()
        assert (last.outputs[0].text, last.finished) == ("d", True)

    fetch(kind, use)


def test_a_reader_waits_for_news():
    async def use(mailbox: Mailbox) -> None:
        waiting = asyncio.ensure_future(mailbox.get())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        mailbox.put(output_of("a"))
        assert (await waiting).outputs[0].text == "a"

    fetch(DELTA, use)


def test_an_error_takes_the_place_of_what_was_not_fetched():
    async def use(mailbox: Mailbox) -> None:
        mailbox.put(output_of("a"))
        mailbox.fail(RuntimeError("broken"))
        with pytest.raises(RuntimeError, match="broken"):
            await mailbox.get()

    fetch(CUMULATIVE, use)


@pytest.mark.parametrize(("kind", "text"), [(DELTA, ""), (CUMULATIVE, "ab")])
def test_an_aborted_request_ends_with_what_there_was(kind, text):
    async def use(mailbox: Mailbox) -> None:
        mailbox.put(output_of("ab"))
        before = await mailbox.get()
        mailbox.abort()
        last = await mailbox.get()
        assert not before.finished
        assert before.outputs[0].finish_reason is None
        assert last.finished
        assert (last.prompt, last.outputs[0].text) == ("p", text)
        assert last.outputs[0].finish_reason == "abort"

    fetch(kind, use)


def test_a_delta_that_was_not_fetched_is_not_lost_to_an_abort():
    async def use(mailbox: Mailbox) -> None:
        mailbox.put(output_of("ab"))
        mailbox.abort()
        last = await mailbox.get()
        assert (last.outputs[0].text, last.finished) == ("ab", True)
        assert last.outputs[0].finish_reason == "abort"

    fetch(DELTA, use)


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
def test_an_end_that_was_not_fetched_stays_as_it_is(kind):
    async def use(mailbox: Mailbox) -> None:
        mailbox.put(output_of("ab", "stop"))
        mailbox.abort()
        (completion,) = (await mailbox.get()).outputs
        assert (completion.text, len(completion.token_ids)) == ("ab", 2)
        assert completion.finish_reason == "stop"

    fetch(kind, use)


@pytest.mark.parametrize("is_fetched", [False, True])
def test_all_texts_of_an_aborted_request_end_and_none_is_told_twice(is_fetched):
    def of_text(index: int, text: str, reason: str | None = None) -> RequestOutput:
        output = output_of(text, reason)
        output.outputs[0].index, output.finished = index, False
        return output

    async def use(mailbox: Mailbox) -> None:
        texts, reasons = ["", "", ""], []
        for output in (of_text(1, "xy"), of_text(0, "ab", "stop")):
            mailbox.put(output)
            if is_fetched:
                collect(await mailbox.get(), texts, reasons)
        mailbox.abort()
        last = await mailbox.get()
        assert last.finished
        collect(last, texts, reasons)
        assert texts == ["ab", "xy", ""]
        assert sorted(reasons) == [(0, "stop"), (1, "abort"), (2, "abort")]

    def collect(output: RequestOutput, texts: list[str], reasons: list) -> None:
        for one in output.outputs:
            texts[one.index] += one.text
            if one.finished():
                reasons.append((one.index, one.finish_reason))

    fetch(DELTA, use, num_texts=3)


def test_a_request_that_never_spoke_is_aborted():
    async def use(mailbox: Mailbox) -> None:
        mailbox.abort()
        last = await mailbox.get()
        assert (last.request_id, last.finished) == ("a", True)
        assert last.outputs[0].finish_reason == "abort"

    fetch(CUMULATIVE, use)
