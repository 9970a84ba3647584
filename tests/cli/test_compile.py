"""`python -m jaxspec compile` compiles all programs that an engine loads later."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from jaxspec import LLM, SamplingParams
from jaxspec import __main__ as command_line
from jaxspec.cli import compile as ahead
from jaxspec.engine import program_cache
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.memory.device_descriptions import DEVICES
from jaxspec.engine.program_cache import Built

SIZES = {"max_num_seqs": 1, "max_num_batched_tokens": 32}
MODELS: dict[str, Any] = SIZES | {"model": "jaxspec/tiny-gemma2"}
FLAGS = "--model jaxspec/tiny-gemma2 --max-num-seqs 1 --max-num-batched-tokens 32"


def run(folder: Path, *more: str) -> int:
    words = ["compile", *FLAGS.split(), "--output", str(folder), *more]
    return command_line.main(words)


def text_of(folder: Path | None) -> str:
    llm = LLM(**MODELS, compilation_cache_dir=folder and str(folder))
    if folder is not None:
        llm.llm_engine.warm_up()
    params = SamplingParams(temperature=0, max_tokens=12)
    [output] = llm.generate("Once upon a time", params, use_tqdm=False)
    return output.outputs[0].text


@pytest.mark.slow
def test_engine_finds_programs_compiled_ahead(tmp_path, monkeypatch, capsys):
    folder, copied = tmp_path / "made", tmp_path / "shipped"
    assert run(folder) == 0
    printed = capsys.readouterr().out
    names = {path.name.partition("-")[0] for path in folder.iterdir()}
    assert names >= {"step_1x0_greedy", "step_1x0_32_sampled"}
    assert all(name in printed for name in names)
    assert f"{len(names)} programs for cpu written to {folder}" in printed
    shutil.copytree(folder, copied)
    shutil.rmtree(folder)

    def lower(*_: object, name: str) -> None:
        raise AssertionError(f"{name} is compiled")

    expected = text_of(None)
    monkeypatch.setattr(program_cache, "lower_step", lower)
    assert text_of(copied) == expected
    assert run(copied) == 0
    assert f"{len(names)} were already there" in capsys.readouterr().out


def test_each_data_parallel_engine_has_its_own_programs(tmp_path, monkeypatch):
    made = []

    def fill(_: object, config, folder: Path) -> None:
        made.append((config.data_parallel_rank, config.data_parallel_size, folder))

    monkeypatch.setattr(ahead, "_fill", fill)
    assert run(tmp_path, "--data-parallel-size", "2") == 0
    assert made == [(0, 2, tmp_path), (1, 2, tmp_path)]


def test_programs_are_compiled_at_once(tmp_path, monkeypatch, capsys):
    both = threading.Barrier(2, timeout=30)

    def fill(_: object, program: Any, shape: Any, *more: Any) -> Built:
        both.wait()  # breaks, and raises, unless two programs are compiled at once
        return Built(executable=print, was_loaded=False, lower_s=1.0, compile_s=2.0)

    whole = ahead.wanted_shapes
    monkeypatch.setattr(ahead, "wanted_shapes", lambda *given: whole(*given)[:2])
    monkeypatch.setattr(program_cache.ProgramCache, "fill", fill)
    assert run(tmp_path, "--jobs", "2") == 0
    printed = capsys.readouterr().out
    assert "2 programs for cpu written" in printed and "2 at once" in printed
    assert run(tmp_path, "--jobs", "0") == 2
    assert "jobs must be an integer of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("extent", ["plain", "all"])
def test_all_wanted_programs_can_be_saved(extent):
    config = EngineArgs(**MODELS).create_engine_config()
    shapes = ahead.wanted_shapes(config, extent)
    assert len(shapes) == len(set(shapes))
    assert not any(shape.features.has_grammar for shape in shapes)
    assert any(shape.features.has_controls for shape in shapes) == (extent == "all")


def test_invalid_arguments_are_reported_first(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "file") == 2
    assert "--output must be a folder" in capsys.readouterr().err
    monkeypatch.setattr(EngineArgs, "create_engine_config", None)  # reads no models
    assert command_line.main(["compile", "--device", "v9"]) == 2
    printed = capsys.readouterr().err
    begin = "python -m jaxspec compile: error: --device must be one of"
    assert printed.startswith(begin)
    assert all(name in printed for name in DEVICES)


def test_table_has_sum():
    printed = ahead.table([("step_1x0_0", 1.0, 2.0, 1000), ("b", 0.5, 3.0, 24)])
    assert printed.splitlines()[-1].split() == ["all", "1.5", "5.0", "1,024"]
    assert ahead.table([]) == ""
