"""`python -m jaxspec plan`: plans and errors."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from jaxspec import __main__ as command_line
from jaxspec.engine.memory import device_descriptions
from tests.checkpoints.gguf_files import write_gguf
from tests.checkpoints.models import tiny_config, write_tiny

PAIR = ("google/gemma-2-9b-it", "--speculative-model", "google/gemma-2-2b-it")
DRAFTS = ("--num-speculative-tokens", "5")
H100 = (*PAIR, *DRAFTS, "--device", "h100")


@pytest.fixture(autouse=True)
def own_process(monkeypatch) -> Iterator[None]:
    """Undo the command's changes to this process, and fail if it downloads a model."""
    monkeypatch.setattr("jaxspec.engine.model_folders.fetch", None)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    before = jax.config.values["jax_platforms"]
    yield
    jax.config.update("jax_platforms", before)


def plan_of(capsys: Any, *arguments: str) -> Any:
    assert command_line.main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_for_an_absent_gpu_is_printed(capsys):
    arguments = (*H100, "--max-num-seqs", "64")
    assert command_line.main(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    for line in ("Memory of h100", "target weights", "17.21 GiB", "4.87 GiB"):
        assert line in text
    assert "13,952 pages of 16 tokens in bfloat16, " in text
    assert "Maximum concurrency at 8,192 tokens: 18.10x" in text
    found = plan_of(capsys, *arguments)
    assert found["parts"]["target weights"] == 18_483_411_968
    assert found["parts"]["draft weights"] == 5_228_683_776
    assert found["num_pages"] == 13952
    assert found["table"] + "\n" == text
    # A page of one kind of layers in place of both: half as many pages of twice the
    # bytes.
    whole = plan_of(capsys, *arguments, "--disable-hybrid-kv-cache-manager")
    assert (whole["num_pages"], whole["max_concurrency"]) == (6976, 13.625)


def test_gguf_file_has_plan_of_its_folder(tmp_path, capsys):
    write_tiny(tmp_path / "hf", family="2b", vocab_size=8192)
    write_gguf(tmp_path / "m.gguf", tiny_config("2b", vocab_size=8192))
    sizes = ("--device", "v5e-1", "--max-num-seqs", "4")
    found = plan_of(capsys, str(tmp_path / "m.gguf"), *sizes)
    assert found["parts"] == plan_of(capsys, str(tmp_path / "hf"), *sizes)["parts"]


@pytest.mark.parametrize("target", ["9b", "27b"])
@pytest.mark.parametrize("device", ["h200", "v5e-8"])
def test_sequences_lost_is_difference_without_draft(capsys, target, device):
    sizes = ("--device", device, "--max-num-seqs", "64")
    model = f"google/gemma-2-{target}-it"
    both = plan_of(capsys, model, *PAIR[1:], *DRAFTS, *sizes)
    alone = plan_of(capsys, model, *sizes)
    total = both["max_concurrency"] + both["sequences_lost"]
    assert total == pytest.approx(alone["max_concurrency"])


@pytest.mark.parametrize(("num_seqs", "length"), [(256, 1024), (600, 8192)])
def test_requested_sequences_fit(capsys, num_seqs, length):
    """The plan counts pages of the named device, not the 74 of this machine."""
    sizes = ("--max-num-seqs", f"{num_seqs}", "--max-model-len", f"{length}")
    found = plan_of(capsys, *PAIR, *DRAFTS, "--device", "h200", *sizes)
    assert found["max_num_seqs"] == num_seqs < found["num_pages"]


@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_plan_has_kv_cache_dtype(capsys, kept):
    arguments = (*H100, "--max-num-seqs", "64", "--kv-cache-dtype", kept)
    found = plan_of(capsys, *arguments)
    assert found["kv_dtype"] == kept
    assert f"pages of 16 tokens in {kept}, " in found["table"]
    assert found["num_pages"] > 1.9 * 13952


def test_target_is_sharded_over_named_devices(capsys):
    found = plan_of(capsys, "google/gemma-2-27b-it", "--device", "v5e-8")
    assert (found["num_devices"], found["limit_bytes"]) == (8, 16_911_433_728)
    assert found["parts"]["target weights"] < 54_454_256_640 / 7.9
    one = ("google/gemma-2-2b", "--device", "v5e-8", "--tensor-parallel-size", "1")
    assert plan_of(capsys, *one)["num_devices"] == 1
    # Each data-parallel engine has an equal share of the devices.
    four = ("google/gemma-2-2b", "--device", "v5e-8", "--data-parallel-size", "4")
    assert plan_of(capsys, *four)["num_devices"] == 2


def test_bundled_pair_on_this_machine(capsys):
    found = plan_of(capsys)
    assert found["device"] == "cpu"
    assert found["limit_bytes"] is None
    assert (found["max_num_seqs"], found["max_num_batched_tokens"]) == (8, 512)
    assert found["draft_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--device", "v9"),
            f"must be one of .*{'.*'.join(device_descriptions.NAMED_DEVICES)}.* 'v9'",
        ),
        (("--device", "a100-80gb", "--compile"), "must be one of .* got 'a100-80gb'"),
        (
            (*PAIR, *DRAFTS, "--device", "v5e-1"),
            "are needed of v5e-1's 15.75 GiB.* Set tensor_parallel_size=4, on 4 such",
        ),
        (("--gpu-memory-utilization", "0"), r"a number in \(0, 1\], got 0"),
        (
            (*H100, "--gpu-memory-utilization", "0.2"),
            "are needed of h100's 74.10 GiB.* Set gpu_memory_utilization=0.34.",
        ),
        (("--kv-cache-memory-bytes", "5"), "kv_cache_memory_bytes must be an integer"),
        (
            ("--num-gpu-blocks-override", "512", "--max-num-seqs", "513"),
            "max_num_seqs must be an integer from 1 to 512, got 513",
        ),
        (
            # These bytes hold 512 pages of 7,208,960 bytes, one for each sequence.
            (*H100, "--max-num-seqs", "513", "--max-model-len", "1024")
            + ("--kv-cache-memory-bytes", "3690987520"),
            "max_num_seqs must be an integer from 1 to 512, got 513",
        ),
        (
            # On a CPU, pages take 512 MiB in all.
            ("--max-num-seqs", "9500"),
            "max_num_seqs must be an integer from 1 to 9362, got 9500",
        ),
    ],
)
def test_errors_are_one_paragraph(capsys, arguments: tuple[str, ...], message: str):
    assert command_line.main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m jaxspec plan: error: ")
    assert error.count("\n") == 1
    assert re.search(message, error), error


def test_common_gpus_have_the_memory_of_their_data_sheets():
    for name, count, gigabytes in (
        *(("t4", 1, 16), ("l4-2", 2, 24), ("a100-40gb", 1, 40)),
        *(("a100-80gb-8", 8, 80), ("h100", 1, 80), ("h200", 1, 141), ("b200", 1, 192)),
    ):
        found = device_descriptions.named_devices(name)
        assert [one.platform for one in found] == ["gpu"] * count
        memory = device_descriptions.MEMORY_BYTES[found[0].device_kind]
        assert 0.9 < memory / (gigabytes * 1e9) < 1.07, name
        assert device_descriptions.named_limit(name, None) < memory


def test_gpu_without_kernels_is_an_error(capsys):
    arguments = ["plan", "google/gemma-3-270m-it", "--max-model-len", "512"]
    assert command_line.main([*arguments, "--device", "l4"]) == 0
    assert command_line.main([*arguments, "--device", "t4"]) == 2
    error = capsys.readouterr().err
    assert "(t4) has compute capability 7.5, but the kernels need at least 8.0" in error


def test_compile_flag_uses_compiler(capsys, monkeypatch):
    asked: list[Any] = []

    def found(config: Any, mesh: Any) -> int:
        asked.append((config, mesh))
        return 3 * 2**30

    probe = "jaxspec.engine.memory.probe"
    monkeypatch.setattr(f"{probe}.compiled_temporaries", found)
    monkeypatch.setattr(f"{probe}.describe_mesh", lambda name, _: name)
    arguments = (*PAIR, *DRAFTS, "--device", "h200")
    assert command_line.main(["plan", *arguments, "--compile"]) == 0
    assert "compiled, for 256 sequences" in capsys.readouterr().out
    [(config, mesh)] = asked
    assert (config.max_num_seqs, mesh) == (256, "h200")
    assert plan_of(capsys, *arguments, "--compile")["parts"]["programs"] == 3 * 2**30
