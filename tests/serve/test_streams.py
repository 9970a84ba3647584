"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from jaxspec.serve.streams import merge


async def count(
    number: int, *, fails: bool = False, log: list[str] | None = None
) -> AsyncGenerator[int, None]:
    try:
        for index in range(number):
            await asyncio.sleep(0.001 * index)
            yield index
        if fails:
            raise ZeroDivisionError
    finally:
        if log is not None:
            log.append(f"closed {number}")


def test_all_of_all():
    async def run() -> None:
        found = [pair async for pair in merge([count(3), count(0), count(5)])]
        assert [index for number, index in found if number == 0] == [0, 1, 2]
        assert [index for number, index in found if number == 2] == list(range(5))
        assert len(found) == 8

    asyncio.run(run())


def test_none_runs_far_ahead_of_its_reader():
    made: list[int] = []

    async def eager() -> AsyncGenerator[int, None]:
        for index in range(100):
            made.append(index)
            yield index

    async def run() -> None:
        seen = 0
        async for _ in merge([eager(), count(2)]):
            seen += 1
            await asyncio.sleep(0.001)
            assert len(made) <= seen + 1

    asyncio.run(run())


def test_an_error_ends_all():
    log: list[str] = []

    async def run() -> None:
        with pytest.raises(ZeroDivisionError):
            async for _ in merge([count(2, fails=True), count(90, log=log)]):
                pass
        assert log == ["closed 90"]

    asyncio.run(run())


def test_leaving_early_closes_all():
    log: list[str] = []

    async def run() -> None:
        merged = merge([count(8, log=log), count(9, log=log)])
        await anext(merged)
        await merged.aclose()
        assert sorted(log) == ["closed 8", "closed 9"]

    asyncio.run(run())
