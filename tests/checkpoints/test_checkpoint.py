"""The bytes of `lm_head.weight` decide what the LM head is, in every format."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.models.families import config_from_folder
from jaxspec_checkpoints import Checkpoint, CheckpointError, lists_head, open_checkpoint
from jaxspec_checkpoints.gemma.published import GEMMA3
from jaxspec_checkpoints.layout import EMBEDDING, HEAD, TIE, Sizes
from jaxspec_checkpoints.report import describe
from jaxspec_checkpoints.tensor import Tensor, in_memory, with_copies
from jaxspec_checkpoints.writing import write_checkpoint
from tests.checkpoints.models import tiny_config, write_tiny

SAID = pytest.mark.parametrize("said", ["nothing", None, True, False])


def write(folder: Path, said: Any, head: Any, dtype: str = "bfloat16") -> Any:
    """Write a model of four 4 MiB blocks of embedding and head; return its tensors.

    Args:
        said: Value of `tie_word_embeddings`; "nothing" omits the key.
        head: Function that makes the head from the embedding; None writes no head.
    """
    tensors: dict[str, Any] = write_tiny(
        folder,
        family="2b",
        dtype=dtype,
        num_hidden_layers=1,
        hidden_size=1024,
        vocab_size=8192,
        **({} if said == "nothing" else {TIE: said}),
    )
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


@SAID
def test_head_with_the_bytes_of_the_embedding_is_dropped(tmp_path, said):
    tensors = write(tmp_path, said, np.copy)
    assert lists_head(tmp_path)
    found = open_checkpoint(tmp_path).resolved()
    del tensors[HEAD]
    check(found, tensors, is_tied=True)
    assert "the embedding" in describe(found)


@SAID
def test_head_that_differs_in_one_number_is_kept_whatever_the_config(tmp_path, said):
    tensors = write(tmp_path, said, with_other_last_row)
    found = open_checkpoint(tmp_path).resolved()
    check(found, tensors, is_tied=False)
    assert f"LM head       {HEAD}" in describe(found)


def test_head_of_nan_is_compared_by_bytes(tmp_path):
    write(tmp_path, True, lambda table: np.full_like(table, np.nan))
    assert HEAD in open_checkpoint(tmp_path).resolved().tensors
    table = np.full((4, 4), np.nan, np.float32)
    first, second = in_memory({"a": table, "b": table.copy()}).values()
    assert list(with_copies(first, [second]).blocks())


def test_head_of_another_type_than_the_embedding_is_kept(tmp_path):
    write(tmp_path, True, lambda table: table.astype(np.float32))
    assert HEAD in open_checkpoint(tmp_path).resolved().tensors


def test_missing_head_is_named(tmp_path):
    write(tmp_path, False, None)
    assert not lists_head(tmp_path)
    expected = "no tensor 'lm_head.weight', and config.json has tie_word_embeddings=fal"
    with pytest.raises(CheckpointError, match=expected):
        open_checkpoint(tmp_path)


def test_tie_word_embeddings_that_is_not_boolean_is_refused(tmp_path):
    write(tmp_path, "no", None)
    with pytest.raises(CheckpointError, match="must be true or false, got 'no'"):
        open_checkpoint(tmp_path)


def test_head_of_another_size_is_refused(tmp_path):
    write(tmp_path, True, lambda table: table[:-1].copy())
    with pytest.raises(CheckpointError, match=r"lm_head.weight' has shape \(8191, "):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("is_tied", [True, False])
def test_head_with_a_prefix_is_compared(tmp_path, prefix, is_tied):
    """Files of Gemma 3 have such a prefix, and may have tensors for images as well."""
    config = tiny_config("2b", model_type="gemma3_text", tie_word_embeddings=True)
    shapes = GEMMA3.tensor_shapes(Sizes.from_config(config))
    random = np.random.default_rng(0)
    tensors = {
        name: random.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }
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
    checkpoint = open_checkpoint(tmp_path / "hf")
    options: dict[str, Any] = dict(progress=False)
    write_checkpoint(checkpoint, tmp_path / "own", to="orbax", **options)
    options |= dict(max_shard_bytes=10**6)
    write_checkpoint(checkpoint, tmp_path / "shards", to="hf", **options)
    assert lists_head(tmp_path / "own") and lists_head(tmp_path / "shards")
    for file in ("model-00001-of-", "model.safetensors.index.json"):
        (path,) = (tmp_path / "shards").glob(f"{file}*")
        path.write_bytes(b"x")
    # `lists_head` raises nothing here: the error of `open_checkpoint` says more.
    assert not lists_head(tmp_path / "shards")
    assert not lists_head(tmp_path / "nowhere")


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("to", ["hf", "orbax"])
def test_conversion_keeps_a_head_and_corrects_config(tmp_path, said, to):
    tensors = write(tmp_path / "source", said, with_other_last_row)
    options: dict[str, Any] = dict(progress=False)
    write_checkpoint(
        open_checkpoint(tmp_path / "source"), tmp_path / "made", to=to, **options
    )
    assert json.loads((tmp_path / "made" / "config.json").read_text())[TIE] is False
    made = open_checkpoint(tmp_path / "made")
    check(made, tensors, is_tied=False)
    write_checkpoint(made, tmp_path / "back", to="hf", **options)
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == tensors.keys()
    if to == "orbax":
        with pytest.raises(CheckpointError, match="hf or orbax for a model with an lm"):
            write_checkpoint(made, tmp_path / "kaggle", to="kaggle", **options)


@pytest.mark.parametrize("to", ["hf", "orbax", "kaggle"])
def test_conversion_drops_a_copy(tmp_path, to):
    tensors = write(tmp_path / "source", False, np.copy)
    write_checkpoint(
        open_checkpoint(tmp_path / "source"), tmp_path / "made", to=to, progress=False
    )
    del tensors[HEAD]
    made = open_checkpoint(tmp_path / "made")
    check(made, tensors, is_tied=True)
    if to == "kaggle":
        config = dict(made.config) | {TIE: False}
        (tmp_path / "made" / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match="no tensor 'lm_head.weight', and"):
            open_checkpoint(tmp_path / "made")


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantizing_conversion_keeps_a_head(tmp_path, kind):
    tensors = write(tmp_path / "source", True, with_other_last_row)
    source = open_checkpoint(tmp_path / "source")
    write_checkpoint(
        source, tmp_path / "made", to="hf", quantization=kind, progress=False
    )
    check(open_checkpoint(tmp_path / "made").resolved(), tensors, is_tied=False)


def test_copies_that_differ_are_found_while_reading():
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    tensors = in_memory(
        {"a": table, "b": table.copy(), "c": with_other_last_row(table)}
    )
    same = with_copies(tensors["a"], [tensors["b"]])
    np.testing.assert_array_equal(same.whole(), table)
    different = with_copies(tensors["a"], [tensors["b"], tensors["c"]])
    with pytest.raises(CheckpointError, match="c and a differ"):
        different.whole()
    with pytest.raises(CheckpointError, match="c and a differ"):
        with_copies(tensors["a"], [tensors["c"].head(2)])
