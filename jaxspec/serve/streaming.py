"""Owns streams: merges several, shares one among readers, sends events.

A stream to a client ends when the client disconnects.
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

# One encoder for all calls: `json.dumps` with options would make an encoder per call.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
# Characters that JSON allows in strings, but at which clients split lines (httpx uses
# `str.splitlines`).
_LINE_ENDS = {ord(one): f"\\u{ord(one):04x}" for one in "\x85\u2028\u2029"}


_write_whole = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":")
).encode
# Depth to which a large response is serialized entry by entry. The log-probabilities of
# one token are at most this deep: in an event, its response, output, item, content and
# part.
_LEVELS = 8
# Maximum number of values of a response that is serialized in the event loop: that
# takes milliseconds.
SHORT_ANSWER = 4096


def is_large(content: Any) -> bool:
    """Return whether a JSON value should be serialized in a thread."""
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
    """Serialize a large response; see `write_in_parts`."""
    return write_in_parts(content).encode()


def write_in_parts(
    value: Any, write: Callable[[Any], str] = _write_whole, levels: int = _LEVELS
) -> str:
    """Serialize a large JSON value in a thread other than the event loop's.

    The encoder holds the interpreter's lock: serializing small parts one by one lets
    other threads run in between.
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
    """The client has disconnected."""


def event(content: Any, *, in_parts: bool = False) -> str:
    """Serialize one server-sent event; its `type`, if any, is the event's name.

    Args:
        in_parts: See `write_in_parts`.
    """
    name = f"event: {content['type']}\n" if "type" in content else ""
    text = write_in_parts(content, _encode) if in_parts else _encode(content)
    if not text.isascii():
        text = text.translate(_LINE_ENDS)
    return f"{name}data: {text}\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await the coroutine `work`; cancel it if the client disconnects.

    Args:
        receive: ASGI's `receive` of a request whose body was read, so that the next
            message can only be the disconnection.

    Raises:
        ClientGoneError: The client has disconnected, and the work was cancelled.
    """
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for one in (task, disconnect):
            one.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Sends events when they arrive, until the last one or the client disconnects.

    With ASGI 2.4 the base class notices a disconnection only at the next event, and
    does not close the generator.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]):
        # Proxies must not buffer or cache the events.
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
    """The events of one stream, which any number of readers can follow from any event.

    Attributes:
        events: All events so far.
    """

    def __init__(self, events: Sequence[Any] = (), *, is_over: bool = False):
        self.events = list(events)
        self._is_over = is_over
        self._changed = asyncio.Event()

    def add(self, content: Any) -> None:
        """Append an event."""
        self.events.append(content)
        self._notify()

    def end(self) -> None:
        """Mark the stream as complete."""
        self._is_over = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @no_type_check  # runtime type checks do not support async generators
    async def follow(self, start: int = 0) -> AsyncGenerator[Any, None]:
        """Yield the events from number `start` on, as they come."""
        while True:
            # Read this before the events, because an event that is added during a
            # `yield` sets it.
            changed = self._changed
            while start < len(self.events):
                yield self.events[start]
                start += 1
            if self._is_over:
                return
            await changed.wait()


@no_type_check  # runtime type checks do not support async generators
async def merge(
    streams: list[AsyncGenerator[Any, None]],
) -> AsyncGenerator[tuple[int, Any], None]:
    """Yield outputs of several streams when they arrive, each with its stream's index.

    No stream runs ahead of the reader by more than one output. The first error closes
    all streams; so does closing this generator.
    """
    if len(streams) == 1:  # the usual case: saves the cost of tasks
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
