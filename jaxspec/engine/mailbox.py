"""One request's outputs, on their way from the engine's thread to who waits."""

import asyncio
import dataclasses

from jaxspec.outputs import CompletionOutput, RequestOutput
from jaxspec.sampling_params import RequestOutputKind


class Mailbox:
    """Holds what has not been fetched: one output, into which later ones are merged.

    Used in the event loop that it was made in. A consumer that is slower than the
    engine gets fewer and longer outputs, and never holds up the others.
    """

    def __init__(self, request_id: str, kind: RequestOutputKind, num_texts: int = 1):
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self._is_delta = kind is RequestOutputKind.DELTA
        self._waiting: RequestOutput | None = None
        self._latest: RequestOutput | None = None
        # What was last put of each text: an output may be of some only.
        self._texts = {
            index: CompletionOutput(index=index, text="", token_ids=[])
            for index in range(num_texts)
        }
        self._error: BaseException | None = None
        self._has_news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Take an output; nothing is added after the last one or an error."""
        self._texts |= {one.index: one for one in output.outputs}
        if self._waiting is None:
            self._waiting = output
        else:
            self._waiting.add(output, aggregate=self._is_delta)
        self._has_news.set()

    def fail(self, error: BaseException) -> None:
        """Have the next `get` raise, in place of what was not fetched."""
        self._waiting, self._error = None, error
        self._has_news.set()

    def abort(self) -> None:
        """End with what there is, for the reason "abort"."""
        self.put(self._aborted())

    async def get(self) -> RequestOutput:
        """Wait for news.

        Raises:
            BaseException: What `fail` was given.
        """
        await self._has_news.wait()
        self._has_news.clear()
        if self._error is not None:
            raise self._error
        output, self._waiting = self._waiting, None
        assert output is not None
        self._latest = output
        return output

    def _aborted(self) -> RequestOutput:
        """The last output: the texts so far, or (deltas) nothing new of who went on."""
        texts = list(self._texts.values())
        if self._is_delta:
            texts = [_emptied(one) for one in texts if not one.finished()]
        latest = self._waiting or self._latest
        if latest is None:
            latest = RequestOutput(
                request_id=self.request_id, prompt=None, prompt_token_ids=None
            )
        return dataclasses.replace(
            latest,
            finished=True,
            outputs=[one if one.finished() else _ended(one) for one in texts],
        )


def _emptied(completion: CompletionOutput) -> CompletionOutput:
    logprobs = completion.logprobs
    nothing = None if logprobs is None else logprobs[:0]
    none = None if completion.token_origins is None else []
    return dataclasses.replace(
        completion, text="", token_ids=[], logprobs=nothing, token_origins=none
    )


def _ended(completion: CompletionOutput) -> CompletionOutput:
    return dataclasses.replace(completion, finish_reason="abort")
