"""The bytes of `lm_head.weight` decide what the LM head is, in every format."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.models.families import config_from_folder
from jaxspec_checkpoints import Checkpoint, CheckpointError, lists_head, open_checkpoint
from jaxspec_checkpoints.layout import EMBEDDING, HEAD, TIE
from jaxspec_checkpoints.report import describe
from jaxspec_checkpoints.tensor import Tensor, in_memory, with_copies
from jaxspec_checkpoints.writing import write_checkpoint
from tests.checkpoints.models import tiny_config, tiny_tensors, write_tiny


def write(folder: Path, said: Any, head: Any) -> Any:
    """Write a model of four 4 MiB blocks of embedding and head; return its tensors.

    Args:
        said: Value of `tie_word_embeddings`; "nothing" omits the key.
        head: Function that makes the head from the embedding; None writes no head.
    """
    changes: dict[str, Any] = {} if said == "nothing" else {TIE: said}
    changes |= dict(num_hidden_layers=1, hidden_size=1024, vocab_size=8192)
    tensors: Any = write_tiny(folder, family="2b", dtype="bfloat16", **changes)
    if head is not None:
        tensors[HEAD] = head(tensors[EMBEDDING])
        save_file(tensors, folder / "model.safetensors")
    return tensors


def with_other_last_row(table: np.ndarray) -> np.ndarray:
    other = table.copy()
    other[-1, -1] += 1
    return other


def check(found: Checkpoint, tensors: dict[str, np.ndarray], is_tied: bool) -> None:
    assert found.tensors.keys() == tensors.keys()
    assert found.config.get(TIE) in ((None, True) if is_tied else (False,))
    for name in {EMBEDDING, HEAD} & tensors.keys():
        assert found.tensors[name].whole().tobytes() == tensors[name].tobytes()


def convert(source: Path, made: Path, **options: Any) -> None:
    write_checkpoint(open_checkpoint(source), made, progress=False, **options)


HEADS = {
    "copy": (np.copy, True),
    "other last row": (with_other_last_row, False),
    "NaN": (lambda table: np.full_like(table, np.nan), False),
    "another type": (lambda table: table.astype("f4"), False),
}
# Configs that contradict the bytes, and every kind of head once.
QUICK = {("copy", False), ("other last row", True), ("other last row", "nothing")}
QUICK |= {("NaN", None), ("another type", True)}


@pytest.mark.parametrize(
    ("said", "head", "is_tied"),
    [
        pytest.param(
            said,
            *HEADS[name],
            id=f"{name}-{said}",
            marks=() if (name, said) in QUICK else pytest.mark.slow,
        )
        for name in HEADS
        for said in ("nothing", None, True, False)
    ],
)
def test_only_head_with_the_bytes_of_the_embedding_is_dropped(
    tmp_path, said, head, is_tied
):
    """The config does not decide; one number that differs does."""
    tensors = write(tmp_path, said, head)
    assert lists_head(tmp_path)
    found = open_checkpoint(tmp_path).resolved()
    if is_tied:
        del tensors[HEAD]
    check(found, tensors, is_tied=is_tied)
    said = "the embedding" if is_tied else f"LM head       {HEAD}"
    assert said in describe(found)


@pytest.mark.parametrize(
    ("said", "head", "message"),
    [
        (False, None, "no tensor 'lm_head.weight', and .* has tie_word_embeddings=fal"),
        ("no", None, "must be true or false, got 'no'"),
        (True, lambda table: table[:-1].copy(), r"lm_head.weight' has shape \(8191, "),
    ],
)
def test_head_must_agree_with_the_config(tmp_path, said, head, message):
    write(tmp_path, said, head)
    assert lists_head(tmp_path) == (head is not None)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("is_tied", [True, False])
def test_head_with_a_prefix_is_compared(tmp_path, prefix, is_tied):
    """Files of Gemma 3 have such a prefix, and may have tensors for images as well."""
    config = tiny_config("2b", model_type="gemma3_text", tie_word_embeddings=True)
    tensors = tiny_tensors(config)
    table = tensors[EMBEDDING]
    tensors[HEAD] = table if is_tied else with_other_last_row(table)
    named = {prefix + name: value for name, value in tensors.items()}
    save_file(named, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert lists_head(tmp_path)
    if is_tied:
        del tensors[HEAD]
    check(open_checkpoint(tmp_path).resolved(), tensors, is_tied=is_tied)
    assert config_from_folder(tmp_path).tie_word_embeddings is is_tied


def test_opening_reads_nothing_and_comparing_stops_at_a_difference(
    tmp_path, monkeypatch
):
    """The LM head's values are read only when weights are loaded.

    Comparing the head with the embedding stops at the first difference.
    """
    write(tmp_path, True, lambda table: table + 1)
    read, blocks = [], Tensor.blocks

    def counted(self: Tensor) -> Any:
        for start, rows in blocks(self):
            read.append(rows.nbytes)
            yield start, rows

    monkeypatch.setattr(Tensor, "blocks", counted)
    assert lists_head(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert not read
    checkpoint.resolved()
    assert sum(read) == 2 * 4 * 2**20
    read.clear()
    write(tmp_path / "copy", True, np.copy)
    open_checkpoint(tmp_path / "copy").resolved()
    assert sum(read) == 2 * 8192 * 1024 * 2


def test_names_of_shards_and_of_own_folders_are_found(tmp_path):
    write(tmp_path / "hf", True, with_other_last_row)
    convert(tmp_path / "hf", tmp_path / "own", to="orbax")
    convert(tmp_path / "hf", tmp_path / "shards", to="hf", max_shard_bytes=10**6)
    assert lists_head(tmp_path / "own") and lists_head(tmp_path / "shards")
    for file in ("model-00001-of-", "model.safetensors.index.json"):
        (path,) = (tmp_path / "shards").glob(f"{file}*")
        path.write_bytes(b"x")
    # `lists_head` raises nothing here: the error of `open_checkpoint` says more.
    assert not lists_head(tmp_path / "shards")
    assert not lists_head(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("to", "quantization", "said"),
    [
        pytest.param(*one, said, marks=() if said is quick else pytest.mark.slow)
        for *one, quick in (
            *(("hf", None, True), ("orbax", None, False)),
            *(("hf", "int8", True), ("hf", "fp8", False)),
        )
        for said in (True, False)
    ],
)
def test_conversion_keeps_a_head_and_corrects_config(tmp_path, said, to, quantization):
    tensors = write(tmp_path / "source", said, with_other_last_row)
    made = tmp_path / "made"
    convert(tmp_path / "source", made, to=to, quantization=quantization)
    assert json.loads((made / "config.json").read_text())[TIE] is False
    found = open_checkpoint(made)
    check(found.resolved(), tensors, is_tied=False)
    if quantization:
        return
    convert(made, tmp_path / "back", to="hf")
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == tensors.keys()
    with pytest.raises(CheckpointError, match="hf or orbax for a model with an lm"):
        convert(made, tmp_path / "kaggle", to="kaggle")


@pytest.mark.parametrize("to", ["hf", "orbax", "kaggle"])
def test_conversion_drops_a_copy(tmp_path, to):
    tensors = write(tmp_path / "source", False, np.copy)
    convert(tmp_path / "source", tmp_path / "made", to=to)
    del tensors[HEAD]
    made = open_checkpoint(tmp_path / "made")
    check(made, tensors, is_tied=True)
    if to == "kaggle":
        config = dict(made.config) | {TIE: False}
        (tmp_path / "made" / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match="no tensor 'lm_head.weight', and"):
            open_checkpoint(tmp_path / "made")


def test_copies_that_differ_are_found_while_reading():
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    table[0, 0] = np.nan  # bytes are compared
    given = {"a": table, "b": table.copy(), "c": with_other_last_row(table)}
    first, same, other = in_memory(given).values()
    np.testing.assert_array_equal(with_copies(first, [same]).whole(), table)
    for copies in ([same, other], [other.head(2)]):
        with pytest.raises(CheckpointError, match="c and a differ"):
            with_copies(first, copies).whole()
