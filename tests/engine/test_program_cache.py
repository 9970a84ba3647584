"""A loaded program equals the saved one; one saved for other inputs is never loaded."""

import dataclasses
import errno
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.engine import program_cache
from jaxspec.engine.program_cache import Built, ProgramCache
from jaxspec.engine.structured_output import TokenMasks
from jaxspec.models import cpu
from jaxspec.program.executable_args import flatten
from jaxspec.program.grammar import native_masks
from jaxspec.program.plan import Features, StepShape
from jaxspec.program.propose import NGram
from jaxspec_checkpoints.quantization import Scheme
from tests.support.tiny_programs import (
    PLAN,
    SHAPE,
    as_state,
    lower_sums,
    make_arguments,
    make_program,
)


@pytest.fixture
def lowered(monkeypatch) -> list[str]:
    """Names of the lowered programs."""
    names = []

    def lower(*arguments: Any, name: str) -> jax.stages.Lowered:
        names.append(name)
        return lower_sums(*arguments, name=name)

    monkeypatch.setattr(program_cache, "lower_step", lower)
    return names


PROGRAM = make_program()
ARGUMENTS = make_arguments(PROGRAM.mesh)
WIDER = dataclasses.replace(SHAPE, num_seqs=2)


def build(cache: ProgramCache | Path, shape: StepShape = SHAPE) -> Built:
    cache = cache if isinstance(cache, ProgramCache) else ProgramCache(cache)
    return cache.build(PROGRAM, shape, ARGUMENTS)


def path_of(folder: Path, program: Any = PROGRAM, shape: StepShape = SHAPE) -> Path:
    path = ProgramCache(folder).path(program, shape, ARGUMENTS)
    assert path is not None
    return path


def run(built: Built, arguments: Any = ARGUMENTS) -> None:
    """Run an executable, and check the sums that it returns."""
    mesh = arguments[0]["w"].sharding.mesh
    plan = jax.device_put(PLAN, NamedSharding(mesh, PartitionSpec()))
    (rows,), result = built.executable(*flatten(arguments), plan)
    np.testing.assert_array_equal(rows, np.full(4, 29.0))
    np.testing.assert_array_equal(result, PLAN + 1)


def failing(error: Exception) -> MagicMock:
    return MagicMock(side_effect=error)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_loaded_program_computes_the_same(tmp_path, lowered, num_devices):
    program = make_program(num_devices)
    arguments = make_arguments(program.mesh)
    folder = tmp_path / "new"
    first = ProgramCache(folder).build(program, SHAPE, arguments)
    assert not first.was_loaded
    assert first.lower_s > 0
    run(first, arguments)
    forms = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding
        ),
        arguments,
    )
    again = ProgramCache(folder).build(program, SHAPE, forms)
    assert again.was_loaded
    assert again.lower_s == 0
    run(again, arguments)
    assert lowered == ["step_1x2_sampled"]
    path = ProgramCache(folder).path(program, SHAPE, arguments)
    assert path is not None
    assert list(folder.iterdir()) == [path]
    assert path.name.startswith("step_1x2_sampled-")


def test_nothing_is_saved_without_a_folder_or_with_a_grammar(tmp_path, lowered):
    run(ProgramCache(None).build(PROGRAM, SHAPE, ARGUMENTS))
    form = dataclasses.replace(SHAPE, features=Features(has_grammar=True))
    for _ in range(2):
        assert not build(tmp_path, form).was_loaded
    with_grammar = ["step_1x2_sampled_grammar_unkept"] * 2
    assert lowered == ["step_1x2_sampled_unkept", *with_grammar]
    assert not list(tmp_path.iterdir())


def test_grammar_program_is_saved_with_native_masks(tmp_path):
    form = dataclasses.replace(SHAPE, features=Features(has_grammar=True))
    cache = ProgramCache(tmp_path)
    for source, is_kept in ((TokenMasks(16), False), (native_masks, True)):
        masked = dataclasses.replace(PROGRAM, mask_source=source)
        assert (cache.path(masked, form, ARGUMENTS) is not None) == is_kept


def test_names_depend_on_all_inputs_of_a_program(tmp_path, monkeypatch):
    cache = ProgramCache(tmp_path)

    def name(program=PROGRAM, shape=SHAPE, arguments=ARGUMENTS, options=None) -> str:
        path = cache.path(program, shape, arguments, options)
        assert path is not None
        return path.name

    names = [name()]
    assert name() == names[0]
    names.append(name(shape=dataclasses.replace(SHAPE, max_prompt_tokens=32)))
    names.append(name(dataclasses.replace(PROGRAM, proposers=(NGram(3, 2),))))
    kept = dataclasses.replace(PROGRAM.target, quantization=Scheme(kind="int8"))
    names.append(name(dataclasses.replace(PROGRAM, target=kept)))
    other = make_program(2)
    names.append(name(other, arguments=make_arguments(other.mesh)))
    longer = as_state(jax.device_put(np.ones(5, np.float32)))
    names.append(name(arguments=(*ARGUMENTS[:2], longer)))
    renamed = {"more": ARGUMENTS[0]["w"]}
    names.append(name(arguments=(renamed, *ARGUMENTS[1:])))
    names.append(name(options={"xla_backend_optimization_level": "0"}))
    with jax.numpy_dtype_promotion("standard"):
        names.append(name())
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_some_flag=1")
        names.append(name())
    for module, attribute, value in (
        (jax, "__version__", "0.0.0"),
        (program_cache, "_sources", lambda: b"other sources"),
        (cpu, "instructions", lambda: "flags: none"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, attribute, value)
            names.append(name())
    assert len(set(names)) == len(names)
    assert name() == names[0]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ((jax, "__version__", "0.0.0"), "versions: .*, and here .*'0.0.0'"),
        ((cpu, "instructions", lambda: "none"), "devices: .*, and here .*'none'"),
        ((program_cache, "_sources", lambda: b"other"), "sources"),
    ],
    ids=["versions", "devices", "sources"],
)
def test_a_miss_names_the_part_that_differs(
    tmp_path, lowered, monkeypatch, caplog, change, part
):
    build(tmp_path)
    assert not caplog.records  # there was nothing to compare with
    monkeypatch.setattr(*change)
    assert not build(tmp_path).was_loaded
    [record] = caplog.records
    assert record.levelname == "WARNING"
    expected = f"step_1x2_sampled is not in .* differs in {part}"
    assert re.search(expected, record.getMessage())
    names = ("versions:", "flags:", "devices:", "settings", "sources")
    named = [name for name in names if f"{name}" in record.getMessage()]
    assert len(named) == 1, "a part that is the same"


def test_a_program_of_another_engine_is_no_warning(tmp_path, lowered, caplog):
    caplog.set_level("INFO", "jaxspec.engine.program_cache")
    build(tmp_path)
    longer = as_state(jax.device_put(np.ones(5, np.float32)))
    ProgramCache(tmp_path).build(PROGRAM, SHAPE, (*ARGUMENTS[:2], longer))
    [record] = caplog.records
    assert record.levelname == "INFO"
    assert record.getMessage().endswith("differs in arguments")


def test_names_do_not_depend_on_paths(tmp_path, monkeypatch):
    first = path_of(tmp_path)
    masked = dataclasses.replace(PROGRAM, mask_source=TokenMasks(16))
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "other"))
    try:
        assert path_of(tmp_path / "b", masked).name == first.name
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    # The same sources in another folder.
    copies = {}
    for package in program_cache._PACKAGES:
        copies[package] = copy = tmp_path / "site" / package
        for name, path in program_cache._files(package):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(path.read_bytes())
    copied = {path.name for path in (tmp_path / "site").rglob("*.py")}
    assert {"step.py", "network.py", "reference.py"} <= copied

    def files(package: str) -> list[tuple[str, Path]]:
        folder = copies[package]
        paths = folder.rglob("*.*")
        return [(path.relative_to(folder).as_posix(), path) for path in paths]

    program_cache._sources.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(program_cache, "_files", files)
        assert path_of(tmp_path) == first
        program_cache._sources.cache_clear()
        (copies["jaxspec"] / "program" / "step.py").write_text("")
        assert path_of(tmp_path) != first
    program_cache._sources.cache_clear()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: b"no zlib",
        lambda content: content[:100],
        lambda content: content[:-1],
        lambda content: content[:300] + bytes([content[300] ^ 1]) + content[301:],
    ],
)
def test_a_damaged_program_is_replaced_with_one_warning(
    tmp_path, caplog, lowered, damage
):
    cache = ProgramCache(tmp_path)
    build(cache)
    [path] = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    built = build(cache)
    assert not built.was_loaded
    run(built)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "is compiled again" in caplog.text
    assert build(tmp_path).was_loaded
    assert len(caplog.records) == 1


def test_a_program_of_another_jax_is_replaced(tmp_path, caplog, lowered, monkeypatch):
    """Usually the file names differ already; here two versions share one name."""
    build(tmp_path)
    load = failing(AttributeError("no such class in jax"))
    module = program_cache.serialize_executable
    monkeypatch.setattr(module, "deserialize_and_load", load)
    assert not build(tmp_path).was_loaded
    assert "no such class" in caplog.text


def test_foreign_files_are_ignored(tmp_path, lowered, monkeypatch):
    (tmp_path / "0123-cache").write_text("of jax")
    (tmp_path / "step_1x2_0.ckpt").write_text("of somebody")
    with monkeypatch.context() as patch:
        patch.setattr(jax, "__version__", "0.0.0")
        build(tmp_path)
    assert not build(tmp_path).was_loaded
    monkeypatch.setattr(program_cache, "MAX_BYTES", 0)
    build(tmp_path, WIDER)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"0123-cache", "step_1x2_0.ckpt"}


def test_least_recently_used_programs_are_removed(tmp_path, lowered, monkeypatch):
    widest = dataclasses.replace(SHAPE, num_seqs=4)
    for age, shape in ((100, SHAPE), (50, WIDER)):
        build(tmp_path, shape)
        path = path_of(tmp_path, shape=shape)
        used_ts = path.stat().st_mtime - age
        os.utime(path, (used_ts, used_ts))
    # The oldest program is used again, so it is not evicted.
    assert build(tmp_path).was_loaded
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    monkeypatch.setattr(program_cache, "MAX_BYTES", int(size * 1.2))
    build(tmp_path, widest)
    left = {path_of(tmp_path), path_of(tmp_path, shape=widest)}
    assert set(tmp_path.iterdir()) == left


def test_unwritable_folder_gives_one_warning(tmp_path, caplog, lowered):
    (tmp_path / "file").write_text("")
    cache = ProgramCache(tmp_path / "file" / "folder")
    for shape in (SHAPE, WIDER):
        assert not build(cache, shape).was_loaded
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be saved" in caplog.text


def test_full_disk_leaves_no_partial_file(tmp_path, caplog, lowered, monkeypatch):
    full = failing(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(Path, "replace", full)
    run(build(tmp_path))
    assert "No space left" in caplog.text
    assert not list(tmp_path.iterdir())


def test_read_only_folder_is_read(tmp_path, caplog, lowered, monkeypatch):
    build(tmp_path)
    refuse = failing(OSError(errno.EROFS, "Read-only file system"))
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert build(tmp_path).was_loaded
    assert not caplog.records
    assert not build(tmp_path, WIDER).was_loaded
    assert "Read-only" in caplog.text


def test_unserializable_programs_give_a_warning(tmp_path, caplog, lowered, monkeypatch):
    serialize = failing(jax.errors.JaxRuntimeError("UNIMPLEMENTED: no such thing"))
    monkeypatch.setattr(program_cache.serialize_executable, "serialize", serialize)
    run(build(tmp_path))
    assert "UNIMPLEMENTED" in caplog.text
    assert not list(tmp_path.iterdir())


def test_file_permissions_follow_the_umask(tmp_path, lowered):
    before = os.umask(0o027)
    try:
        build(tmp_path)
    finally:
        os.umask(before)
    [path] = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o640


def test_threads_build_at_once(tmp_path, lowered):
    cache, shapes = ProgramCache(tmp_path), [SHAPE, WIDER] * 3
    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(build, [cache] * 6, shapes))
    assert len(list(tmp_path.iterdir())) == 2


def test_jax_settings_are_not_changed(tmp_path, lowered, monkeypatch):
    name = "persistent_cache_min_compile_time_secs"
    setting = getattr(program_cache.thread_settings, name)
    before = dict(jax.config.values)
    seen = []

    class Watched(jax.stages.Lowered):
        def compile(self, *arguments, **options):
            seen.append(setting.value)
            other = threading.Thread(target=lambda: seen.append(setting.value))
            other.start()
            other.join()
            return super().compile(*arguments, **options)

    def lower(*arguments: Any, name: str) -> Any:
        made = lower_sums(*arguments, name=name)
        made.__class__ = Watched
        return made

    monkeypatch.setattr(program_cache, "lower_step", lower)
    build(tmp_path)
    assert seen == [float("inf"), before[f"jax_{name}"]]
    assert dict(jax.config.values) == before
