"""Programs compiled for devices that this machine lacks are written completely."""

import pytest

from jaxspec.cli import compile as ahead
from jaxspec.engine.program_cache import _is_whole
from tests.kernels import aot_gpu, aot_tpu


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "missing"),
    [
        ("v5e-8", aot_tpu.MISSING),
        ("h200", aot_gpu.missing()),
        ("b200", aot_gpu.missing()),
    ],
)
def test_programs_for_described_devices_are_written(
    tmp_path, monkeypatch, capsys, device, missing
):
    if missing is not None:
        pytest.skip(missing)
    whole = ahead.wanted_shapes
    monkeypatch.setattr(ahead, "wanted_shapes", lambda *given: whole(*given)[:1])
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    flags = ["--model", "jaxspec/tiny-gemma2", "--max-num-seqs", "1"]
    assert ahead.main([*flags, "--device", device, "--output", str(tmp_path)]) == 0
    assert f"1 programs for {device} written" in capsys.readouterr().out
    [path] = tmp_path.iterdir()
    assert _is_whole(path)
    assert ahead.main([*flags, "--device", device, "--output", str(tmp_path)]) == 0
    assert "1 were already there" in capsys.readouterr().out
