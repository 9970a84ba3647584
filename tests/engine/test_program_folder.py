"""Programs are stored in a bucket as in a folder; unusable addresses are errors."""

import importlib.util
import logging
from pathlib import Path

import pytest

from jaxspec.engine import program_cache, program_folder
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.program_cache import ProgramCache
from jaxspec.engine.program_folder import check_readable, folder_at
from jaxspec.errors import ConfigError
from tests.support.tiny_programs import SHAPE, lower_sums, make_arguments, make_program

backend = pytest.importorskip("etils.epath.backend")
memory = pytest.importorskip("fsspec.implementations.memory")

PLACE = "gs://bucket/programs"


@pytest.fixture
def bucket(monkeypatch):
    """Google Cloud Storage in memory, as fsspec's client of it."""

    class Storage(memory.MemoryFileSystem):
        protocol = ("gcs", "gs")
        store: dict = {}
        pseudo_dirs = [""]

        @classmethod
        def _strip_protocol(cls, path):
            return "/" + str(path).removeprefix("gs://").strip("/")

    storage = Storage(skip_instance_cache=True)
    monkeypatch.setattr(backend.fsspec_backend, "_get_filesystem", lambda _: storage)
    monkeypatch.setattr(program_folder, "_PACKAGES", ("etils", "fsspec"))
    return storage


def make(cache: ProgramCache):
    program = make_program()
    return cache.build(program, SHAPE, make_arguments(program.mesh))


def test_program_is_read_from_a_bucket(bucket, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(program_cache, "lower_step", lower_sums)
    folder = folder_at(PLACE)
    check_readable(folder)  # nothing is there yet
    assert not make(ProgramCache(folder)).was_loaded
    [name] = bucket.store
    assert name.startswith("/bucket/programs/step_") and name.endswith(".program")
    assert make(ProgramCache(folder_at(PLACE + "/"))).was_loaded
    # The first line of a file in the bucket says what differs.
    monkeypatch.setattr(program_cache.jax, "__version__", "0.0.0")
    assert not make(ProgramCache(folder)).was_loaded
    assert "differs in versions: " in caplog.text
    assert len(bucket.store) == 2


def test_bucket_that_fails_is_an_error_at_the_start_and_a_warning_later(
    bucket, monkeypatch, caplog
):
    monkeypatch.setattr(program_cache, "lower_step", lower_sums)

    class RefusedError(Exception):  # not an OSError, as in gcsfs
        pass

    def refuse(*_, **__):
        raise RefusedError("401")

    for name in ("ls", "open", "info", "pipe_file", "cat_file", "_open"):
        monkeypatch.setattr(type(bucket), name, refuse)
    with pytest.raises(ConfigError, match="gs://bucket/programs' cannot be read: .*40"):
        check_readable(folder_at(PLACE))
    assert not make(ProgramCache(folder_at(PLACE))).was_loaded
    assert "cannot be saved in gs://bucket/programs" in caplog.text


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("s3://bucket/programs", "must be a folder, or gs://BUCKET/FOLDER, got"),
        (PLACE, 'pip install "jaxspec-decoding\\[gcs\\]"'),
    ],
)
def test_unusable_address_is_an_error(place, message, monkeypatch):
    find = importlib.util.find_spec

    def without(name: str, *more):
        return None if name in ("gcsfs", "tensorflow") else find(name, *more)

    monkeypatch.setattr("jaxspec.extras.find_spec", without)
    monkeypatch.setattr(program_folder, "find_spec", without)
    args = EngineArgs(compilation_cache_dir=place)
    with pytest.raises(ConfigError, match=message):
        args.create_engine_config()


def test_local_paths_are_folders():
    assert folder_at("programs") == Path("programs")
    check_readable(Path("missing"))
