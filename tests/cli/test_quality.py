"""`python -m jaxspec quality`: measurements, files and errors."""

import json
from pathlib import Path

import pytest

from jaxspec import __main__ as command_line
from jaxspec.engine.model_folders import BUNDLED_DRAFT, BUNDLED_TARGET
from jaxspec_checkpoints import bundled_draft, open_checkpoint
from jaxspec_checkpoints.__main__ import main as checkpoints
from jaxspec_checkpoints.quality import QUALITY, read_quality
from jaxspec_checkpoints.writing import write_checkpoint

TEXT = "The cat saw a bird. It wanted to play, and so it ran up the tree. " * 8
SIZES = ("--length", "32", "--rows", "2")


@pytest.fixture
def packed(tmp_path) -> Path:
    folder = tmp_path / "packed"
    draft = open_checkpoint(bundled_draft())
    write_checkpoint(draft, folder, to="hf", quantization="int4", progress=False)
    (tmp_path / "some.txt").write_text(TEXT)
    (tmp_path / "some.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    return folder


def run(folder: Path, *more: str, reference: str = BUNDLED_DRAFT) -> int:
    arguments = ["--model", str(folder), "--reference", reference, *more]
    return command_line.main(["quality", *arguments])


def test_compares_quantized_checkpoint_with_original(packed, capsys):
    assert run(packed, "--text", str(packed.parent / "some.txt"), *SIZES) == 0
    printed = capsys.readouterr().out
    found = read_quality(packed)
    assert found is not None
    assert (found.reference, found.texts) == ("tiny-gemma2-draft", "some.txt")
    assert found.num_tokens % (2 * 31) == 0 and found.num_tokens > 0
    assert found.perplexity == pytest.approx(found.reference_perplexity, rel=0.1)
    assert 1e-4 < found.kl_nats_per_token < 0.1
    assert 0.5 < found.share_of_same_first < 1
    # Every line of the file has the same text.
    assert found.table("int4 in groups of 128 (compressed-tensors)") in printed
    assert f"{packed / QUALITY}: {found.line()}" in printed
    assert run(packed, "--text", str(packed.parent / "some.jsonl"), *SIZES) == 0
    again = read_quality(packed)
    assert again is not None and again.perplexity == found.perplexity
    capsys.readouterr()
    assert checkpoints(["inspect", str(packed)]) == 0
    assert again.line() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "reference", "message"),
    [
        (SIZES, BUNDLED_TARGET, "--reference must be a model with the sizes of "),
        (SIZES, "{packed}", "--reference must be an unquantized model"),
        (("--length", "9999"), BUNDLED_DRAFT, "--text must be files with 4 pieces of"),
        (("--rows", "0"), BUNDLED_DRAFT, "--rows must be an integer of at least 1"),
        (("--length", "1"), BUNDLED_DRAFT, "--length must be an integer of at least 2"),
        (("--dtype", "int8"), BUNDLED_DRAFT, "--dtype must be one of 'float32'"),
    ],
)
def test_rejects_models_that_cannot_be_compared(
    packed, capsys, more, reference, message
):
    text = ("--text", str(packed.parent / "some.txt"))
    reference = reference.format(packed=packed)
    assert run(packed, *text, *more, reference=reference) == 2
    assert message in capsys.readouterr().err
    assert not (packed / QUALITY).exists()
    assert run(bundled_draft(), *text) == 2
    assert "--model must be a quantized checkpoint" in capsys.readouterr().err
