"""The parser reads headers as llama.cpp's library does, and refuses damaged ones."""

import hashlib
import os
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec_checkpoints import CheckpointError, open_checkpoint
from jaxspec_checkpoints.gguf import file as gguf_file
from jaxspec_checkpoints.gguf.file import read_gguf
from tests.checkpoints.gguf_files import golden, real_gguf, write_gguf

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def text(content: str | bytes) -> bytes:
    data = content.encode() if isinstance(content, str) else content
    return struct.pack("<Q", len(data)) + data


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + values


def tensor(name: str, sizes: list[int], kind: int = 0, offset: int = 0) -> bytes:
    form = f"<I{len(sizes)}QIQ"
    return text(name) + struct.pack(form, len(sizes), *sizes, kind, offset)


def build(
    entries: list[bytes],
    tensors: list[bytes],
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    alignment: int = 32,
    data: bytes = bytes(4096),
    **counts: int,
) -> bytes:
    found = dict(num_tensors=len(tensors), num_entries=len(entries)) | counts
    head = magic + struct.pack("<IQQ", version, *found.values())
    head += b"".join([*entries, *tensors])
    return head + bytes(-len(head) % alignment) + data


def with_value(key: str | bytes, kind: int, value: bytes) -> bytes:
    return build([entry(key, kind, value)], [])


def with_array(kind: int, count: int, values: bytes = b"") -> bytes:
    return with_value("k", ARRAY, array(kind, count, values))


def with_tensor(*given: Any) -> bytes:
    return build([], [tensor(*given)])


ALIGN = entry("general.alignment", U32, struct.pack("<I", 64))
GOOD = build([ALIGN], [tensor("a", [8, 4]), tensor("b", [32, 2], 2, 128)], alignment=64)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_all_types_of_values_are_read(tmp_path):
    numbers: list[tuple[int, str, Any]] = [
        *((U8, "<B", 200), (I8, "<b", -3), (U16, "<H", 60000), (I16, "<h", -30000)),
        *((U32, "<I", 2**32 - 1), (I32, "<i", -(2**31)), (F32, "<f", 1e-6)),
        *((BOOL, "<?", True), (U64, "<Q", 2**64 - 1), (I64, "<q", -(2**63))),
        (F64, "<d", 0.1),
    ]
    entries = [
        entry(form, kind, struct.pack(form, value)) for kind, form, value in numbers
    ]
    entries += [
        entry("text", STRING, text("Grüße")),
        entry("strings", ARRAY, array(STRING, 3, text("a") + text("") + text("ü"))),
        entry("none", ARRAY, array(STRING, 0, b"")),
        entry("floats", ARRAY, array(F32, 2, struct.pack("<2f", 0.5, -1.0))),
        entry("flags", ARRAY, array(BOOL, 2, b"\1\0")),
    ]
    found = read_gguf(write(tmp_path / "m.gguf", build(entries, []))).metadata
    for _, form, value in numbers:
        assert found[form] == value and type(found[form]) is type(value), form
    assert found["text"] == "Grüße"
    assert found["strings"] == ["a", "", "ü"] and found["none"] == []
    np.testing.assert_array_equal(found["floats"], [0.5, -1.0])
    np.testing.assert_array_equal(found["flags"], [True, False])


def test_tensors_are_read_at_the_offsets_in_the_header(tmp_path):
    file = read_gguf(write(tmp_path / "m.gguf", GOOD))
    assert file.version == 3 and file.tensors.keys() == {"a", "b"}
    first, second = file.tensors["a"], file.tensors["b"]
    assert first.shape == (4, 8) and second.shape == (2, 32)
    assert first.offset % 64 == 0 and second.offset == first.offset + 128
    assert first.num_bytes == 128 and second.num_bytes == 36
    assert second.type.name == "Q4_0"


def test_header_is_read_as_by_llama_cpps_library(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, default=gguf.GGMLQuantizationType.Q8_0)
    file, theirs = read_gguf(path), gguf.GGUFReader(path)
    keys = {key for key in theirs.fields if not key.startswith("GGUF.")}
    assert file.metadata.keys() == keys
    for key in keys:
        value, found = theirs.fields[key].contents(), file.metadata[key]
        if isinstance(found, float):
            found, value = np.float32(found), np.float32(value)
        np.testing.assert_array_equal(found, value)
    assert list(file.tensors) == [one.name for one in theirs.tensors]
    for one in theirs.tensors:
        ours = file.tensors[one.name]
        assert ours.offset == one.data_offset and ours.num_bytes == one.n_bytes
        assert ours.shape == tuple(reversed(one.shape.tolist()))
        assert ours.type.name == one.tensor_type.name


@pytest.mark.parametrize("piece", [1, 7, 64, 1000])
def test_header_is_read_in_chunks_of_any_size(tmp_path, monkeypatch, piece):
    write_gguf(tmp_path / "m.gguf")
    whole = read_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr(gguf_file, "_PIECE_BYTES", piece)
    found = read_gguf(tmp_path / "m.gguf")
    assert found.tensors == whole.tensors
    tokens = "tokenizer.ggml.tokens"
    assert found.metadata[tokens] == whole.metadata[tokens]


# Contents of files, and the errors of reading them.
BAD: list[tuple[bytes, str]] = [
    (b"", "it has 0 bytes, less than a header"),
    (build([], [], magic=b"GGML"), "begins with b'GGML', not with b'GGUF'"),
    (b"<!DOCTYPE html><html>Log in</html>", "begins with b'<!DO'"),
    (b"version https://git-lfs.github.com/spec/v1", "begins with b'vers'"),
    (b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(64), "big-endian: .*gguf-con"),
    (build([], [], version=1), "its version is 1, but only 2 and 3 are supported"),
    (build([], [], version=4), "its version is 4"),
    (build([], [], num_tensors=10**9), "1,000,000,000 tensors, but at most"),
    (build([], [], num_entries=2**63), "metadata keys, but at most"),
    (build([], [], num_entries=9, data=b""), "within its header"),
    (build([struct.pack("<Q", 2**60)], [], num_entries=1), "has 1,152,.* at most 65"),
    (with_value(b"\xff\xfe", U8, b"\0"), "a metadata key is not UTF-8"),
    (with_value("k", STRING, text(b"\xff")), "value of 'k' is not UTF-8"),
    (with_array(STRING, 2, text("a") + text(b"\xc3")), "'k', string 1, is not UTF-8"),
    (with_value("k" * 2**20, U8, b"\0"), "a metadata key has 1,048,576 bytes, but at"),
    (with_tensor("k" * 2**20, [8]), "a tensor's name has 1,048,576 bytes"),
    (with_value("general.alignment", STRING, text("k" * 2**18)), "got 'k{60}'$"),
    (build([ALIGN, ALIGN], []), "'general.alignment' appears twice"),
    (build([], [tensor("a", [8])] * 2), "tensor 'a' appears twice"),
    (with_value("k", 13, b""), "type 13, which does not exist"),
    (with_array(99, 1), "are of type 99, which is not supported"),
    (with_array(ARRAY, 1, array(U8, 1, b"\0")), "of an array, which is not supported"),
    (with_array(STRING, 10**9), "has 1,000,000,000 values, but at most"),
    (with_array(STRING, 10**6), "1,000,000 strings, more than the file has room for"),
    (with_array(F64, 2**62), "values, but at most"),
    (with_array(F64, 10**6), "within its header"),
    (with_array(STRING, 1, struct.pack("<Q", 2**40)), "within its header"),
    (with_value("general.alignment", U32, bytes(4)), "must be a power of two, got 0"),
    (with_value("general.alignment", U32, b"0\0\0\0"), "be a power of two, got 48"),
    (with_value("general.alignment", STRING, text("32")), "power of two, got '32'"),
    (with_tensor("a", []), "tensor 'a' has 0 dimensions"),
    (with_tensor("a", [1] * 5), "has 5 dimensions"),
    (with_tensor("a", [8, 0]), r"sizes \[8, 0\]: expected at"),
    (with_tensor("a", [40], 2), "the first a multiple of 32 for Q4_0"),
    (with_tensor("a", [2**32] * 3), "tensor 'a' ends at byte .* file is truncated"),
    (with_tensor("a", [8], 0, 2**40), "tensor 'a' ends at byte"),
    (with_tensor("a", [8], 0, 2**64 - 32), "ends at byte"),
    (with_tensor("a", [8], 0, 4), "has offset 4, no multiple of the alignment 32"),
    (with_tensor("a", [256], 16), "IQ2_XXS, .* Choose .*F32, F16, Q4_0"),
    (with_tensor("a", [256], 999), "is of type number 999"),
    (with_value("split.count", STRING, text("x")), "count must be an integer, got 'x'"),
    (with_value("split.count", U16, b"\3\0"), "is one of 3 shards"),
    (with_value("split.tensors.count", I32, b"\3\0\0\0"), "hold 0 tensors, not 3"),
    (with_value("split.count", ARRAY, array(U8, 2, b"\1\1")), "must be an integer"),
]


@pytest.mark.parametrize(("content", "message"), BAD, ids=[text for _, text in BAD])
def test_damaged_files_are_refused(tmp_path, content, message):
    path = write(tmp_path / "m.gguf", content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message) as caught:
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_every_truncation_is_noticed(tmp_path):
    for size in range(len(GOOD) - 4096 + 128 + 36):
        path = write(tmp_path / "m.gguf", GOOD[:size])
        with pytest.raises(CheckpointError):
            read_gguf(path)


def test_header_over_its_limits_is_refused(tmp_path, monkeypatch):
    content = with_array(STRING, 3, text("a") * 3)
    path = write(tmp_path / "m.gguf", content)
    for limits, message in (
        (dict(_MAX_STRINGS=2), "has more than 2 strings"),
        (
            dict(_MAX_STRINGS=3, _PIECE_BYTES=8, _MAX_HEADER_BYTES=40),
            "header has more than 40 bytes",
        ),
    ):
        for name, value in limits.items():
            monkeypatch.setattr(gguf_file, name, value)
        with pytest.raises(CheckpointError, match=message):
            read_gguf(path)


def test_impossible_names_of_shards_are_refused(tmp_path):
    for name, message in (
        ("m-00003-of-00002.gguf", "not named like a shard"),
        ("m-00000-of-00002.gguf", "not named like a shard"),
        ("m-00001-of-99999.gguf", "at most 1024 shards"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_gguf(write(tmp_path / name, GOOD))
    count = entry("split.count", U16, struct.pack("<H", 2))
    for number in (1, 2):
        content = build([count], [tensor("a", [8])])
        write(tmp_path / f"n-0000{number}-of-00002.gguf", content)
    with pytest.raises(CheckpointError, match="tensor 'a' is also in .*n-00001"):
        read_gguf(tmp_path / "n-00001-of-00002.gguf")


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> bytes:
    """Return the bytes of a small model's file, without a tokenizer."""
    path = tmp_path_factory.mktemp("small") / "m.gguf"
    write_gguf(path, has_tokenizer=False)
    return path.read_bytes()


@settings(max_examples=150)
@given(data=st.data())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_changed_bytes_never_crash_the_parser(small, tmp_path_factory, data):
    """Read the header, the config and a row of each tensor of damaged files."""
    content = bytearray(small)
    header_bytes = small.index(b"output_norm.weight") + 64
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, header_bytes - 1))
        changed = data.draw(st.binary(min_size=1, max_size=8))
        content[place : place + len(changed)] = changed
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    path = write(tmp_path_factory.getbasetemp() / "damaged.gguf", bytes(content))
    tracemalloc.start()
    try:
        for one in open_checkpoint(path).tensors.values():
            one.read(0, 1)
    except CheckpointError as error:
        assert "\n" not in str(error)
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < 16 * 2**20


def test_real_file_is_read():
    """Check names, offsets and numbers of the real Gemma 3 270M, and the time."""
    path, recorded = real_gguf(), golden()
    start = time.process_time()
    file = read_gguf(path)
    # Reading takes 0.12 s of processor time; the limit is for slower processors.
    assert time.process_time() - start < 0.5
    assert len(file.tensors) == 236 and len(file.metadata) == 33
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 262144
    assert min(one.offset for one in file.tensors.values()) == 6_525_120
    checkpoint = open_checkpoint(path)
    config, generation = checkpoint.config, checkpoint.generation_config
    names = recorded["config"].keys() & config.keys() - {
        "rms_norm_eps",
        "architectures",
    }
    for name in names - {"model_type", "dtype", "torch_dtype"}:
        assert config[name] == recorded["config"][name], name
    assert len(names) >= 14 and generation["eos_token_id"] == 1
    tensors = checkpoint.tensors.values()
    by_place = {each.source.rpartition(":")[2]: each for each in tensors}
    assert len(recorded["tensor_checks"]) == 6
    for check in recorded["tensor_checks"]:
        digest = hashlib.sha256()
        for _, rows in by_place[check["name"]].blocks():
            if check["name"].endswith("norm.weight"):
                rows = rows + np.float32(1)
            digest.update(np.ascontiguousarray(rows, "<f4").data)
        assert digest.hexdigest() == check["sha256_f32le"], check["name"]


def test_reads_an_unchanged_header_once(tmp_path: Path):
    path = tmp_path / "model.gguf"
    write_gguf(path)
    assert read_gguf(path).metadata is not read_gguf(path).metadata  # just written
    long_ago = time.time_ns() - 60 * 10**9
    os.utime(path, ns=(long_ago, long_ago))
    found = read_gguf(path)
    assert read_gguf(path).metadata is found.metadata
    os.utime(path, ns=(long_ago, long_ago + 1))
    assert read_gguf(path).metadata is not found.metadata
    found = read_gguf(path)
    gguf_file.forget_headers()
    assert read_gguf(path).metadata is not found.metadata
