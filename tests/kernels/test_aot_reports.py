"""Reports of compilers are read again only if no input of the compiler has changed."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.kernels import aot_reports
from tests.kernels.aot_reports import VARIABLE, Report, compile_lowered, digest

OPTIONS = {"xla_backend_optimization_level": "0"}


def lower(factor: float = 2.0, size: int = 4, *, donates: bool = False) -> Any:
    jitted = jax.jit(lambda x: x * factor, donate_argnums=(0,) if donates else ())
    return jitted.lower(jax.ShapeDtypeStruct((size,), jnp.float32))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "reports"))
    return tmp_path / "reports"


def test_equal_program_is_not_compiled_again(folder, monkeypatch):
    made = compile_lowered(lower(), OPTIONS)
    compiled = lower().compile(OPTIONS)
    assert made.as_text() == compiled.as_text()
    found, expected = made.memory_analysis(), compiled.memory_analysis()
    assert found.argument_size_in_bytes == expected.argument_size_in_bytes == 16
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    assert compile_lowered(lower(), OPTIONS) == made
    with pytest.raises(TypeError):
        compile_lowered(lower(3.0), OPTIONS)


def test_long_suites_compile_every_program(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not isinstance(compile_lowered(lower(), OPTIONS), Report)


def test_dumped_files_are_kept(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(aot_reports, "DUMPED", ("*after_optimizations.txt",))
    made = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        compile_lowered(lower(), OPTIONS, dump=tmp_path / name)
        [path] = (tmp_path / name).glob("*after_optimizations.txt")
        made.append(path.read_text())
    assert "HloModule" in made[0]
    assert made[0] == made[1]
    assert len(list((tmp_path / "second").iterdir())) == 1, "it was compiled again"


def test_every_input_of_a_compiler_is_in_the_digest(monkeypatch):
    found = [
        digest(lower(), OPTIONS),
        *(digest(one, OPTIONS) for one in (lower(3.0), lower(size=5))),
        *(digest(lower(donates=True), OPTIONS), digest(lower())),
        digest(lower(), OPTIONS, is_dumped=True),
    ]
    with jax.default_device(jax.devices()[1]):
        found.append(digest(lower(), OPTIONS))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_new_option=true")
    found.append(digest(lower(), OPTIONS))
    monkeypatch.setattr(aot_reports, "compiler_versions", lambda: ["libtpu 9.9"])
    found.append(digest(lower(), OPTIONS))
    assert len(set(found)) == len(found)
    assert digest(lower(), OPTIONS) == found[-1]
