"""What a store gives back does what was put in, and is never of something else."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.program import store as store_module
from jaxspec.program.store import ProgramStore
from jaxspec.sharding import make_mesh


def compiled(mesh, factor: float) -> jax.stages.Compiled:
    whole = NamedSharding(mesh, PartitionSpec())
    row = NamedSharding(mesh, PartitionSpec(mesh.axis_names[-1]))
    value = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=row)
    other = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)

    def run(tree, other):
        return {"sum": tree["value"].sum() * factor + other, "tree": tree}

    return jax.jit(run).lower({"value": value}, other).compile()


@pytest.mark.parametrize("devices", [1, 2])
def test_what_is_loaded_computes_the_same(tmp_path, devices):
    mesh = make_mesh(devices)
    store = ProgramStore(tmp_path / "new")
    row = NamedSharding(mesh, PartitionSpec(mesh.axis_names[-1]))
    whole = NamedSharding(mesh, PartitionSpec())
    arguments = (
        {"value": jax.device_put(jnp.arange(8.0), row)},
        jax.device_put(jnp.float32(1), whole),
    )
    result = {"sum": 0, "tree": {"value": 0}}
    name = store.name(mesh, "sum")
    assert store.load(name, mesh, arguments, result) is None
    store.save(name, compiled(mesh, 2.0))
    loaded = store.load(name, mesh, ({"value": 0}, 0), result)
    assert loaded is not None
    found = loaded(*arguments)
    assert float(found["sum"]) == 57.0
    np.testing.assert_array_equal(found["tree"]["value"], np.arange(8.0))
    assert [path.name for path in (tmp_path / "new").iterdir()] == [name]


def test_names_follow_all_that_a_program_depends_on(tmp_path, monkeypatch):
    store, mesh = ProgramStore(tmp_path), make_mesh(1)
    names = [store.name(mesh, "a", 1)]
    assert store.name(mesh, "a", 1) == names[0]
    names.append(store.name(mesh, "a", 2))
    names.append(store.name(mesh, "a1"))
    names.append(store.name(make_mesh(2), "a", 1))
    with jax.default_matmul_precision("float32"):
        names.append(store.name(mesh, "a", 1))
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_some_flag=1")
        names.append(store.name(mesh, "a", 1))
    with monkeypatch.context() as patch:
        patch.setattr(jax, "__version__", "0.0.0")
        names.append(store.name(mesh, "a", 1))
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "_sources", lambda: b"other sources")
        names.append(store.name(mesh, "a", 1))
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "_cpu_flags", lambda: "flags: none")
        names.append(store.name(mesh, "a", 1))
    assert len(set(names)) == len(names)
    assert store.name(mesh, "a", 1) == names[0]


def test_sources_of_both_packages_count():
    packages = store_module._PACKAGES
    names = {path.name for one in packages for path in store_module._files(one)}
    assert {"step.py", "gemma2.py", "reference.py"} <= names


def test_a_damaged_program_is_compiled_again(tmp_path, caplog):
    store, mesh = ProgramStore(tmp_path), make_mesh(1)
    name, result = store.name(mesh), {"sum": 0, "tree": {"value": 0}}
    store.save(name, compiled(mesh, 2.0))
    for content in (b"", b"no zlib", (tmp_path / name).read_bytes()[:100]):
        (tmp_path / name).write_bytes(content)
        assert store.load(name, mesh, ({"value": 0}, 0), result) is None
        assert "compiled again" in caplog.text
        caplog.clear()


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    store, mesh = ProgramStore(tmp_path / "file" / "folder"), make_mesh(1)
    store.save(store.name(mesh), compiled(mesh, 1.0))
    assert "cannot be kept" in caplog.text


def test_devices_whose_programs_cannot_be_kept_cost_a_warning(
    tmp_path, caplog, monkeypatch
):
    def serialize(_: object) -> None:
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no such thing here")

    monkeypatch.setattr(store_module.serialize_executable, "serialize", serialize)
    store, mesh = ProgramStore(tmp_path), make_mesh(1)
    store.save(store.name(mesh), compiled(mesh, 1.0))
    assert "UNIMPLEMENTED" in caplog.text
    assert not list(tmp_path.iterdir())


# What a start does with a program: load it, or compile and keep it.
START = """
import sys
import jax, jax.numpy as jnp
from jaxspec.engine.runner import use_compilation_cache
from jaxspec.program.store import unseen_name
from jaxspec.sharding import make_mesh

store, mesh = use_compilation_cache(sys.argv[1]), make_mesh(1)
value = jnp.arange(64.0).reshape(8, 8)

def run(value):
    return jnp.tanh(value @ value) * jax.nn.softmax(value)

run.__name__ = unseen_name()
step = store.load("program", mesh, (value,), value)
print("compiled" if step is None else "loaded")
if step is None:
    step = jax.jit(run).lower(value).compile()
    store.save("program", step)
print(float(step(value).sum()))
"""


def start(folder: Path) -> list[str]:
    command = [sys.executable, "-c", START, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("lost", [b"", None])
def test_a_lost_program_is_kept_again_although_the_cache_of_jax_had_it(tmp_path, lost):
    first, total = start(tmp_path)
    assert (first, *start(tmp_path)) == ("compiled", "loaded", total)
    path = tmp_path / "programs" / "program"
    if lost is None:
        path.unlink()
    else:
        path.write_bytes(lost)
    assert start(tmp_path) == ["compiled", total]
    assert start(tmp_path) == ["loaded", total]
