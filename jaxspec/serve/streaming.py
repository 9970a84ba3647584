"""Owns streams: several read as one, one read by several, sent as events.

A stream to a client ends when the client has gone.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, TypeVar, no_type_check

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = "data: [DONE]\n\n"

# Made once: `json.dumps` makes one for every text that is not written by default.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
# Characters at which clients cut lines (httpx: `str.splitlines`); JSON may hold them.
_LINE_ENDS = {ord(one): f"\\u{ord(one):04x}" for one in "\x85\u2028\u2029"}


_write_whole = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":")
).encode
# Levels of an answer above the log-probabilities of one token: the deepest are those of
# an event, its response, output, item, content and part.
_LEVELS = 8
# Values of an answer that take milliseconds to write.
SHORT_ANSWER = 4096


def is_large(content: Any) -> bool:
    """Whether a JSON value takes so long to write that it belongs into a thread."""
    level, count = [content], 0
    while level and count <= SHORT_ANSWER:
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
            elif isinstance(value, list):
                inner += value
        level, count = inner, count + len(inner)
    return count > SHORT_ANSWER


def encoded(content: dict[str, Any]) -> bytes:
    """Write a large answer; see `write_in_parts`."""
    return write_in_parts(content).encode()


def write_in_parts(
    value: Any, write: Callable[[Any], str] = _write_whole, levels: int = _LEVELS
) -> str:
    """Write a large JSON value, for a thread other than the event loop's.

    The encoder lets no other thread run: small parts are written one by one.
    """
    if levels and isinstance(value, dict):
        fields = (
            f"{write(str(name))}:{write_in_parts(one, write, levels - 1)}"
            for name, one in value.items()
        )
        return f"{{{','.join(fields)}}}"
    if levels and isinstance(value, list):
        entries = (write_in_parts(one, write, levels - 1) for one in value)
        return f"[{','.join(entries)}]"
    return write(value)


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


def event(content: Any, *, in_parts: bool = False) -> str:
    """Write one event of a stream; one with a type is named by it.

    Args:
        in_parts: See `write_in_parts`.
    """
    name = f"event: {content['type']}\n" if "type" in content else ""
    text = write_in_parts(content, _encode) if in_parts else _encode(content)
    if not text.isascii():
        text = text.translate(_LINE_ENDS)
    return f"{name}data: {text}\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do some work, as long as the client is there.

    Args:
        receive: Gives nothing more of the request but the client's leaving.

    Raises:
        ClientGoneError: It has gone, and the work was cancelled.
    """
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for one in (task, leaving):
            one.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Sends events as they come, until the last one or until the client has gone.

    Its base, where the server speaks ASGI 2.4, waits for the next event of a client who
    has left, and does not close the events.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]):
        # An intermediary that collects the events would undo the streaming.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self.stream_response(send))
        except ClientGoneError:
            return
        finally:
            await self._events.aclose()


class EventLog:
    """The events of one stream, for any number of readers, whenever they come.

    Attributes:
        events: All so far.
    """

    def __init__(self, events: Sequence[Any] = (), *, is_over: bool = False):
        self.events = list(events)
        self._is_over = is_over
        self._news = asyncio.Event()

    def add(self, content: Any) -> None:
        """Go on."""
        self.events.append(content)
        self._tell()

    def end(self) -> None:
        """Say that nothing more comes."""
        self._is_over = True
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    @no_type_check  # asynchronous generators are not checked
    async def follow(self, start: int = 0) -> AsyncGenerator[Any, None]:
        """Yield the events from number `start` on, as they come."""
        while True:
            # Before a look at the events: one that comes meanwhile sets it.
            news = self._news
            while start < len(self.events):
                yield self.events[start]
                start += 1
            if self._is_over:
                return
            await news.wait()


@no_type_check  # asynchronous generators are not checked
async def merge(
    streams: list[AsyncGenerator[Any, None]],
) -> AsyncGenerator[tuple[int, Any], None]:
    """Yield what any of the streams yields, with that stream's number.

    None runs ahead of its reader by more than one output. The first error of any ends
    all; so does leaving early.
    """
    if len(streams) == 1:  # the usual case, and tasks cost more than the stream itself
        async with contextlib.aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    waiting = {
        asyncio.ensure_future(anext(stream, None)): number
        for number, stream in enumerate(streams)
    }
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = waiting.pop(task)
                output = task.result()
                if output is not None:
                    following = asyncio.ensure_future(anext(streams[number], None))
                    waiting[following] = number
                    yield number, output
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
