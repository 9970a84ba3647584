"""Malloc settings that the process makes, and memory that it returns to the system."""

import contextlib
import ctypes
import os
from collections.abc import Callable

import pytest

from jaxspec.engine.memory import malloc


class Library:
    """A fake glibc that records its calls."""

    def __init__(self):
        self.limits: dict[int, int] = {}
        self.trims: list[int] = []

    def mallopt(self, number: int, value: int) -> int:
        self.limits[number] = value
        return 1

    def malloc_trim(self, pad: ctypes.c_size_t) -> int:
        self.trims.append(pad.value)
        return 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(malloc, "_is_glibc", lambda: True)
    for name in [*os.environ]:
        if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES":
            monkeypatch.delenv(name)
    return library


permit: Callable[[], None] = malloc.permit_spare_arenas.__wrapped__


@pytest.mark.parametrize(("num_cores", "num_arenas"), [(2, 64), (100, 800)])
def test_permits_spare_arenas(library, monkeypatch, num_cores: int, num_arenas: int):
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    permit()
    assert library.limits == {-8: num_arenas}  # M_ARENA_MAX of glibc's malloc.h


@pytest.mark.parametrize("fails", [False, True])
def test_large_arrays_are_mapped_in_the_block_alone(library: Library, fails: bool):
    with contextlib.suppress(ZeroDivisionError), malloc.large_arrays_mapped():
        # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
        assert library.limits == {-1: 2**26, -3: 2**20}
        if fails:
            raise ZeroDivisionError
    assert library.limits == {-1: 2**26, -3: 2**25}


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_limits_of_the_user_are_kept(library: Library, monkeypatch, name: str):
    monkeypatch.setenv(name, "1")
    permit()
    with malloc.large_arrays_mapped():
        assert not library.limits


def test_refused_limit_is_logged(library: Library, monkeypatch, caplog):
    monkeypatch.setattr(library, "mallopt", lambda number, value: 0)
    permit()
    assert "glibc refused mallopt(-8, 64)" in caplog.text


@pytest.mark.parametrize("is_glibc", [True, False])
def test_only_glibc_is_called(library: Library, monkeypatch, is_glibc: bool):
    monkeypatch.setattr(malloc, "_is_glibc", lambda: is_glibc)
    permit()
    with malloc.large_arrays_mapped():
        malloc.trim_malloc()
    assert bool(library.limits) == is_glibc
    assert library.trims == [0] * is_glibc  # 0 bytes are kept
