"""The library of C++ operations is built, cached and loaded, or an error says why."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec_kernels import native
from jaxspec_kernels.native import compiling

pytestmark = pytest.mark.usefixtures("has_native")


CODE = """
import logging
logging.basicConfig()
from jaxspec_kernels import native
from jaxspec_kernels.dispatch import implementation_for
print(native.is_available(), implementation_for("cpu"))
try:
    native.require("panel_matmul")
except NotImplementedError as error:
    print(error)
"""


def run_in_new_process(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CODE],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.parametrize(
    ("environment", "warning"),
    [
        (dict(PATH="/nowhere", CXX=""), "there is no C++ compiler"),
        (dict(CXX="false"), "fails"),
        (dict(JAXSPEC_NATIVE="off"), None),
    ],
)
def test_without_a_compiler_xla_is_used_with_a_warning(tmp_path, environment, warning):
    done = run_in_new_process(**{"JAXSPEC_NATIVE": str(tmp_path)} | environment)
    assert done.stdout.startswith("False reference\npanel_matmul has no 'cpu'")
    assert ("WARNING" in done.stderr) == (warning is not None)
    assert (warning or "") in done.stderr
    assert not list(tmp_path.iterdir())


def test_instructions_in_use_are_logged():
    code = CODE.replace("basicConfig()", "basicConfig(level=logging.INFO)")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    (name,) = re.findall("Native CPU operations use (.*)", done.stderr)
    # `test_native_builds` has the name for each build.
    library = native.load(os.environ[native.VARIABLE])
    assert name == native.instructions(library)


def quick_compiler(folder: Path) -> tuple[str, str]:
    """Return a fake compiler, which copies the existing library to save time.

    Returns:
        Its path, and the library's.
    """
    built = native.load(os.environ[native.VARIABLE])._name
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


def test_a_damaged_library_is_built_again(tmp_path, monkeypatch, caplog):
    quick, built = quick_compiler(tmp_path)
    monkeypatch.setattr(native, "_compiler", lambda: quick)
    folder, whole = tmp_path / "kept", Path(built).read_bytes()
    native.load(str(folder))
    (path,) = folder.iterdir()
    assert path.read_bytes() == whole and not caplog.records
    middle = len(whole) // 2
    # The loader accepts both files; reading past the end of the first crashes the
    # process.
    for damaged in (whole[:middle], whole[:middle] + bytes(64) + whole[middle + 64 :]):
        path.unlink()
        path.write_bytes(damaged)
        # Run in a separate process, which the damaged file may crash.
        done = run_in_new_process(CXX=quick, JAXSPEC_NATIVE=str(folder))
        assert done.stdout == "True cpu\n"
        assert done.stderr.count("is damaged, so it is built again") == 1
        assert list(folder.iterdir()) == [path]
        assert path.read_bytes() == whole


@pytest.mark.parametrize("obstacle", ["no folder", "full disk", "no home"])
def test_library_that_cannot_be_cached_is_loaded(
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
    library = native.load(given)
    assert hasattr(library, native.TARGETS[0])
    (record,) = caplog.records
    assert "cannot be saved" in record.message and native.VARIABLE in record.message
    assert obstacle != "full disk" or not list(folder.iterdir())


@pytest.mark.parametrize(
    ("machine", "flag"),
    [
        ("x86_64", "-march=native"),
        ("arm64", "-mcpu=native"),
        ("aarch64", "-mcpu=native"),
    ],
)
def test_compiler_gets_the_flag_of_the_processor(monkeypatch, tmp_path, machine, flag):
    """Apple's clang rejects -march=native, and its linker gets no options."""
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
        str(source) for source in compiling.sources_in(native._FOLDER)
    }
    for command in commands:
        assert command[0] == "c++"
        assert flag in command and "-std=c++17" in command and "-fPIC" in command
        assert sum("=native" in word for word in command) == 1
    assert "-shared" in link and not any(word.startswith("-Wl") for word in link)


def test_a_library_is_for_one_kind_of_processor(monkeypatch):
    """A library's name depends on the processor's instructions.

    Machines may share a folder of libraries, and processors may be replaced.
    """
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
def test_library_has_no_undefined_symbols_of_xla():
    """Otherwise Apple's linker, which needs all symbols, would reject it."""
    library = native.load(os.environ[native.VARIABLE])._name
    command = ["nm", "-D", "--undefined-only", library]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # nm prints "U name@VERSION" for symbols of the system's libraries, and "w" for
    # symbols that may be missing.
    names = [line.split()[1] for line in output.splitlines() if line.split()[0] == "U"]
    known = "@GLIBC", "@GLIBCXX", "@CXXABI", "@GCC", "@LIBC"
    assert names
    if any(name.startswith("__asan_") for name in names):
        return  # a sanitizer's symbols have no version
    assert [name for name in names if not any(map(name.__contains__, known))] == []


def test_best_shipped_library_for_the_processor_is_loaded(tmp_path, monkeypatch):
    built = Path(native.load(os.environ[native.VARIABLE])._name)
    include = native.jax.ffi.include_dir()
    monkeypatch.setattr(native, "_SHIPPED", tmp_path)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(native, "_compiler", None)  # none is needed
    flags = frozenset[str]()
    monkeypatch.setattr(native, "_processor_flags", lambda: flags)
    assert native.shipped_library("on") is None, "the folder is empty"
    names = {}
    for variant in compiling.VARIANTS["x86_64"]:
        names[variant.name] = compiling.shipped_name(variant, native._FOLDER, include)
        shutil.copy(built, tmp_path / names[variant.name])
    for variant in compiling.VARIANTS["x86_64"]:
        flags = variant.needs
        assert native.shipped_library("on") == tmp_path / names[variant.name]
        assert native.shipped_library(str(tmp_path)) is None, "a folder to build in"
    flags = compiling.VARIANTS["x86_64"][0].needs - {"avx2"}
    assert native.load("on")._name == str(tmp_path / names["x86-64"])
    monkeypatch.setattr(native, "is_available", lambda: True)
    monkeypatch.setenv(native.VARIABLE, "on")
    assert native.digest() == names["x86-64"]
    # XLA calls libraries for older minor versions of its interface, and no others.
    major, minor = compiling.interface_version(include)
    for change, is_found in (((0, 2), True), ((0, -1), False), ((1, 2), False)):
        version = major + change[0], minor + change[1]
        monkeypatch.setattr(compiling, "interface_version", lambda _, v=version: v)
        assert (native.shipped_library("on") is not None) == is_found, version
    monkeypatch.setattr(compiling, "interface_version", lambda _: (major, minor))
    monkeypatch.setattr(compiling, "digest_of", lambda *_: "of other sources")
    assert native.shipped_library("on") is None


def test_interface_version_is_read_from_xlas_header(tmp_path):
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR 1\n#define XLA_FFI_API_MINOR 12\n")
    assert compiling.interface_version(str(tmp_path)) == (1, 12)
    header.write_text("#define XLA_FFI_API_MAJOR 1\n")
    with pytest.raises(RuntimeError, match="does not define XLA's version"):
        compiling.interface_version(str(tmp_path))
    major, minor = compiling.interface_version(native.jax.ffi.include_dir())
    assert major >= 0 and minor >= 3, "that of jaxlib 0.10.2"
