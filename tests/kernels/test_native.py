"""Operations in C++: exact, a row's bits its own, and built or refused plainly."""

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec_kernels import native, paged_attention
from jaxspec_kernels.paged_attention.cases import CASES as CALLS
from tests.kernels.oracle import EXACT, SMALL, build, error, excess, random_forest

pytestmark = pytest.mark.usefixtures("has_native")
SIXTEEN = replace(SMALL, head_dim=16)


def attend(call, **changes):
    given: Any = call.settings | dict(ancestor_mask=call.ancestor_mask) | changes
    return np.asarray(paged_attention(*call.arrays, **given, implementation="cpu"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint16"])
@pytest.mark.parametrize("name", CALLS)
def test_attention_equals_float64(name, dtype):
    call = build(CALLS[name], dtype="bfloat16" if dtype == "uint16" else dtype)
    if dtype == "uint16":
        query, pages, *rest = call.arrays
        bits = jax.lax.bitcast_convert_type(pages, jnp.uint16)
        given: Any = call.settings | dict(implementation="cpu")
        found = paged_attention(query, bits, *rest, **given)
    else:
        found = attend(call)
    assert excess(call, found) <= EXACT


@pytest.mark.parametrize(
    ("window", "soft_cap"), [(None, 2.0), (1, 2.0), (7, 2.0), (16, 2.0), (7, None)]
)
def test_ragged_batches_and_trees_equal_float64(window, soft_cap):
    case = replace(SIXTEEN, window=window, soft_cap=soft_cap)
    for seed in range(6):
        call = build(case, seed)
        assert error(call, attend(call)) <= EXACT
    tree = replace(case, queries=7)
    for seed in range(6):
        kv_len = [7, *np.random.default_rng(seed).integers(7, 91, 3).tolist()]
        call = build(tree, seed, kv_len=kv_len, mask=random_forest(4, 7, seed))
        assert error(call, attend(call)) <= EXACT


def test_attention_of_pads_and_empty_sequences_is_zero():
    call = build(SIXTEEN, kv_len=[0, 2, 5, 90])
    found = attend(call)
    assert not found[0].any() and not found[1, :3].any()
    assert found[1, 3:].any(axis=(1, 2)).all()


def test_attention_of_a_token_does_not_depend_on_the_tokens_beside_it():
    call = build(replace(SIXTEEN, queries=6), kv_len=[90, 41, 16, 6])
    query, pages, table, kv_len = call.arrays
    whole = attend(call)
    settings: Any = call.settings
    for count in range(1, 6):
        found = paged_attention(
            query[:, 6 - count :],
            pages,
            table,
            kv_len,
            **settings,
            implementation="cpu",
        )
        np.testing.assert_array_equal(found, whole[:, 6 - count :])


def test_other_heads_take_the_reference():
    call = build(SMALL)  # head_dim 8
    assert error(call, attend(call)) <= EXACT


def run_in_new_process(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )


def test_without_a_compiler_xla_serves_and_says_so(tmp_path):
    code = (
        "import logging; logging.basicConfig()\n"
        "from jaxspec_kernels import native\n"
        "from jaxspec_kernels.dispatch import implementation_for\n"
        "print(native.is_available(), implementation_for('cpu'))\n"
        "try: native.require('panel_matmul')\n"
        "except NotImplementedError as error: print(error)\n"
    )
    folder = str(tmp_path / "none")
    done = run_in_new_process(code, PATH="/nowhere", CXX="", JAXSPEC_NATIVE=folder)
    assert done.stdout.startswith("False reference\npanel_matmul has no 'cpu'")
    assert "there is no C++ compiler" in done.stderr
    done = run_in_new_process(code, JAXSPEC_NATIVE="off")
    assert done.stdout.startswith("False reference")
    assert "WARNING" not in done.stderr


def quick_compiler(folder: Path) -> tuple[str, str]:
    """Make a compiler that links the library which is there: building takes long.

    Returns:
        Its path, and the library's.
    """
    built = native._load(os.environ[native.VARIABLE])._name
    quick = folder / "c++"
    quick.write_text(
        "#!/bin/sh\n"
        'case "$*" in *-shared*)\n'
        '  while [ "$1" != -o ]; do shift; done\n'
        f'  cp "{built}" "$2"\n'
        "esac\n"
    )
    quick.chmod(0o755)
    return str(quick), built


def test_a_broken_compiler_is_reported(tmp_path):
    code = (
        "import logging; logging.basicConfig()\n"
        "from jaxspec_kernels import native; print(native.is_available())"
    )
    done = run_in_new_process(code, CXX="false", JAXSPEC_NATIVE=str(tmp_path))
    assert done.stdout == "False\n"
    assert "fails" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_damaged_library_is_built_again(tmp_path, monkeypatch, caplog):
    quick, built = quick_compiler(tmp_path)
    monkeypatch.setattr(native, "_compiler", lambda: quick)
    folder, whole = tmp_path / "kept", Path(built).read_bytes()
    native._load(str(folder))
    (path,) = folder.iterdir()
    assert path.read_bytes() == whole and not caplog.records
    middle = len(whole) // 2
    # The loader takes both: the first ends the process when it is read past its end.
    for damaged in (whole[:middle], whole[:middle] + bytes(64) + whole[middle + 64 :]):
        path.unlink()
        path.write_bytes(damaged)
        # A process of its own, which the old file may end.
        done = run_in_new_process(
            "import logging; logging.basicConfig()\n"
            "from jaxspec_kernels import native; print(native.is_available())",
            CXX=quick,
            JAXSPEC_NATIVE=str(folder),
        )
        assert done.stdout == "True\n"
        assert done.stderr.count("is damaged, and is built again") == 1
        assert list(folder.iterdir()) == [path]
        assert path.read_bytes() == whole


@pytest.mark.parametrize("obstacle", ["no folder", "full disk", "no home"])
def test_a_library_that_cannot_be_kept_is_loaded(
    tmp_path, monkeypatch, caplog, obstacle
):
    quick, _ = quick_compiler(tmp_path)
    monkeypatch.setattr(native, "_compiler", lambda: quick)
    folder = tmp_path / "kept"
    given = str(folder)

    def fail(*_: object) -> None:
        raise (RuntimeError if obstacle == "no home" else OSError)(obstacle)

    match obstacle:
        case "no folder":
            folder.touch()
        case "full disk":
            monkeypatch.setattr(os, "fsync", fail)
        case _:
            given = native.ON
            monkeypatch.delenv("XDG_CACHE_HOME")
            monkeypatch.setattr(Path, "home", fail)
    library = native._load(given)
    assert hasattr(library, native.TARGETS[0])
    (record,) = caplog.records
    assert "cannot be kept" in record.message and native.VARIABLE in record.message
    assert obstacle != "full disk" or not list(folder.iterdir())


@pytest.mark.parametrize(
    ("machine", "flag"),
    [
        ("x86_64", "-march=native"),
        ("arm64", "-mcpu=native"),
        ("aarch64", "-mcpu=native"),
    ],
)
def test_compilers_are_told_of_the_processor_in_their_words(
    monkeypatch, tmp_path, machine, flag
):
    """Apple's clang knows none by the other name, and links without further flags."""
    commands = []

    def take(command, **_):
        commands.append(command)
        if "-shared" in command:
            Path(command[command.index("-o") + 1]).touch()

    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(subprocess, "run", take)
    path = native._build("c++", tmp_path)
    assert path.is_file() and list(tmp_path.iterdir()) == [path]
    *compiles, link = commands
    assert {command[-1] for command in compiles} == {
        str(source) for source in native._sources()
    }
    for command in commands:
        assert command[0] == "c++"
        assert flag in command and "-std=c++17" in command and "-fPIC" in command
        assert sum("=native" in word for word in command) == 1
    assert "-shared" in link and not any(word.startswith("-Wl") for word in link)


def test_a_library_is_for_one_kind_of_processor(monkeypatch):
    """Folders of libraries may be shared, and processors replaced."""
    here = native._digest.__wrapped__("c++")
    asked = []

    def brand(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="Apple M1\n")

    monkeypatch.setattr(subprocess, "run", brand)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert native._processor() == "Apple M1"
    assert native._digest.__wrapped__("c++") != here
    assert asked[0][1:] == ["-n", "machdep.cpu.brand_string"]


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm here")
def test_nothing_is_left_to_be_found_when_a_library_is_loaded():
    """Else Apple's linker, which wants all symbols, would refuse it."""
    library = native._load(os.environ[native.VARIABLE])._name
    command = ["nm", "-D", "--undefined-only", library]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # "U name@VERSION" of the system's libraries, and "w", which may be absent.
    names = [line.split()[1] for line in told.splitlines() if line.split()[0] == "U"]
    known = "@GLIBC", "@GLIBCXX", "@CXXABI", "@GCC", "@LIBC"
    assert names
    if any(name.startswith("__asan_") for name in names):
        return  # a sanitizer has names of the system itself, without versions
    assert [name for name in names if not any(map(name.__contains__, known))] == []
