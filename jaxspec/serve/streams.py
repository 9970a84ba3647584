"""Owns several streams of outputs read as one."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, no_type_check


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
