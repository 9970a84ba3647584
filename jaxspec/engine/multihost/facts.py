"""Facts that must be equal in all processes of one target, compared at the start."""

import dataclasses
import hashlib
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.config.engine import EngineConfig
from jaxspec_checkpoints.gguf.file import shards
from jaxspec_checkpoints.gguf.reading import find_gguf

# Fields that may differ between hosts: paths, and fields that only the leader uses.
LOCAL_FIELDS = (
    *("model", "tokenizer", "served_model_name", "chat_template"),
    *("compilation_cache_dir", "disable_log_stats", "generation_defaults"),
    "otlp_traces_endpoint",
    *("structured_outputs", "speculative.model", "hosts.node_rank"),
    *("hosts.master_addr", "hosts.headless", "hosts.secret_file", "hosts.timeout_s"),
)
# Maps fields to the names of the arguments with which users set them.
_ARGUMENTS = {"page_size": "block_size", "num_pages": "num_gpu_blocks_override"}
# Longest fact that is sent in full; a digest replaces the rest of a longer one.
_MAX_FACT = 120
# Number of samples that are read from a file of weights, besides its header, and the
# bytes of each.
NUM_SAMPLES, SAMPLE_BYTES = 32, 2**16
# Maximum bytes of a file's header: the limit of safetensors itself.
MAX_SAFETENSORS_HEADER_BYTES = 100 * 10**6


def facts_of(config: EngineConfig, others: Mapping[str, object]) -> dict[str, str]:
    """Return the facts that must be equal in all processes, by name.

    Args:
        others: Facts beyond the configuration: versions, sources.
    """
    values = dict(_flat("", config))
    for name in LOCAL_FIELDS:
        values.pop(name, None)
    models = {"weights of the target": config.model}
    if config.speculative is not None and config.speculative.model is not None:
        models["weights of the draft"] = config.speculative.model
    for name, folder in models.items():
        files = _weight_files(Path(folder))
        values[name] = [(one.name, one.stat().st_size, _digest(one)) for one in files]
    return {name: _fact(value) for name, value in {**values, **others}.items()}


def difference(leader: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """Describe the first difference by name between two processes; None for none."""
    for name in sorted({*leader, *other}):
        if leader.get(name) != other.get(name):
            theirs, ours = other.get(name, "not set"), leader.get(name, "not set")
            called = name.removeprefix("given.")
            called = _ARGUMENTS.get(called, called)
            return f"{called}: {theirs} there, and {ours} at the leader"
    return None


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    gguf = None if files else find_gguf(folder)
    return files if gguf is None else shards(gguf)


def _digest(path: Path) -> str:
    """Return a digest that differs between files of the same name and shapes.

    Reads 2 MiB of the file, because all of it may be tens of GiB on a network disk. A
    difference of a few bytes elsewhere is not seen.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest = hashlib.sha256(struct.pack("!Q", size))

        def add(start: int, count: int) -> None:
            file.seek(start)
            digest.update(file.read(count))

        # safetensors: the length of the JSON header, then the header.
        file.seek(0)
        start = file.read(8)
        if not start.startswith(b"GGUF"):
            num_header = int.from_bytes(start, "little")
            add(0, 8 + min(num_header, MAX_SAFETENSORS_HEADER_BYTES))
        for index in range(NUM_SAMPLES):
            add(size * index // NUM_SAMPLES, SAMPLE_BYTES)
        add(max(size - SAMPLE_BYTES, 0), SAMPLE_BYTES)
    return digest.hexdigest()[:16]


def _flat(prefix: str, record: Any) -> list[tuple[str, object]]:
    """List the fields of a dataclass, and of dataclasses in it, by dotted names."""
    fields: list[tuple[str, object]] = []
    for one in dataclasses.fields(record):
        name, value = prefix + one.name, getattr(record, one.name)
        if dataclasses.is_dataclass(value) and name not in LOCAL_FIELDS:
            fields += _flat(f"{name}.", value)
        else:
            fields.append((name, value))
    return fields


def _fact(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    if len(text) <= _MAX_FACT:
        return text
    return f"{text[:_MAX_FACT]}... ({hashlib.sha256(text.encode()).hexdigest()[:16]})"
