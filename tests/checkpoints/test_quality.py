"""`quality.json`: written, shown by `inspect`, and refused where it is damaged."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from jaxspec_checkpoints import CheckpointError
from jaxspec_checkpoints.__main__ import main
from jaxspec_checkpoints.quality import QUALITY, Quality, read_quality, write_quality
from tests.checkpoints.gguf_files import Q, write_gguf
from tests.checkpoints.models import write_tiny

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
