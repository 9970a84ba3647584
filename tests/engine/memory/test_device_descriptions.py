"""Described devices: sizes of parameters and state equal an engine's; known names."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from jaxspec.config.speculation import SYNTHETIC
from jaxspec.engine import program_cache, runner
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.loader import make_runner
from jaxspec.engine.memory import device_descriptions
from jaxspec.engine.program_cache import ProgramCache
from jaxspec.errors import ConfigError
from jaxspec.program.plan import StepShape

WRONG_NAMES = ("v5e", "h200-9", "h300", "v9", "H100", "")
DRAFT_MODEL = {"method": "draft_model", "model": "jaxspec/tiny-gemma2-draft"}
SYNTHETIC_DRAFT = DRAFT_MODEL | {
    "draft_tensor_parallel_size": 1,
    "rejection_sample_method": SYNTHETIC,
    "synthetic_acceptance_rates": [0.5, 0.25],
}


@pytest.mark.parametrize(
    ("dtype", "num_devices", "drafts", "scan_layers"),
    [
        pytest.param(*place, drafts, scan_layers, marks=marks)
        for drafts, scan_layers in (
            ({}, False),
            (DRAFT_MODEL, False),
            (DRAFT_MODEL, True),
            ({"method": "ngram", "prompt_lookup_max": 2}, False),
            ({"method": "suffix"}, False),
            ({"method": "suffix", "suffix_decoding_max_cached_requests": 2}, False),
            (SYNTHETIC_DRAFT, False),
        )
        for place in itertools.product(("float32", "bfloat16"), (1, 2))
        # Float32 on one device has another storage layout of both models' weights.
        # Other quick cases also have a draft model, or a cache of answers.
        for marks in [
            ()
            if (
                place == ("bfloat16", 2)
                and drafts != {"method": "suffix"}
                and (drafts != DRAFT_MODEL or scan_layers)
            )
            or (place, drafts, scan_layers) == (("float32", 1), DRAFT_MODEL, False)
            else pytest.mark.slow
        ]
    ],
)
def test_described_program_equals_the_engines(
    tmp_path, dtype, num_devices, drafts, scan_layers
):
    config = EngineArgs(
        model="jaxspec/tiny-gemma2",
        speculative_config=drafts | {"num_speculative_tokens": 2} if drafts else None,
        dtype=dtype,
        max_num_seqs=2,
        max_model_len=64,
        tensor_parallel_size=num_devices,
        load_format="dummy",
        scan_layers=scan_layers,
    ).create_engine_config()
    mesh = device_descriptions.describe_mesh(None, config)
    program, forms = device_descriptions.describe(config, mesh)
    runner = make_runner(config)
    shape = StepShape(num_seqs=1, num_levels=0, max_prompt_tokens=0)
    cache = ProgramCache(tmp_path)
    real: Any = (*runner.params, runner.state)
    assert cache.path(program, shape, forms) == cache.path(runner.program, shape, real)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, "--device must be one of v5e-1, .* got") for name in WRONG_NAMES),
        ("v6e-4", "libtpu.*pip install"),
        ("h200-2", "CUDA plugin.*pip install"),
    ],
)
def test_rejects_unknown_devices_and_missing_compilers(name, message, monkeypatch):
    for module in (device_descriptions, runner):
        monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=message):
        device_descriptions.check_device(name)


def test_named_devices_include_described_devices():
    for name in device_descriptions.DEVICES:
        if " to " not in name:
            assert device_descriptions.named_devices(name)
    assert len(device_descriptions.named_devices("v6e-4")) == 4
    # A v7x chip is two devices, with half of its 192 GiB each.
    assert len(device_descriptions.named_devices("v7x-2")) == 2
    assert device_descriptions.named_limit("v7x-8", None) == 94.75 * 2**30
    assert [one.id for one in device_descriptions.named_devices("h100-2")] == [0, 1]
    assert device_descriptions.named_devices("h100")[0].platform == "gpu"
    for name in (*WRONG_NAMES, "v5e-2", "v7x-1"):
        with pytest.raises(ConfigError, match="--device must be one of .* h100-2"):
            device_descriptions.named_devices(name)
    for kind in device_descriptions._DESCRIBED_GPUS:
        assert kind in device_descriptions.DEVICES
        described = (device_descriptions._TARGETS / f"{kind}.txtpb").read_text()
        assert f"NVIDIA {kind.upper()}" in described


def test_described_devices_have_real_device_kinds():
    def called(**device: Any) -> str:
        return repr(list(program_cache._about([SimpleNamespace(id=0, **device)])))

    real = called(platform="gpu", device_kind="NVIDIA H200")
    assert called(platform="gpu", device_kind="NVIDIA H200 141GB HBM3e") == real
    assert called(platform="gpu", device_kind="NVIDIA H100 80GB HBM3") != real

    def chip(built: str, coords: Any) -> str:
        client = SimpleNamespace(platform_version=built)
        kind = "TPU v5 lite"
        return called(platform="tpu", device_kind=kind, client=client, coords=coords)

    assert chip("TFRT cl/1", [0, 0, 0]) == chip("TFRT cl/1", (0, 0, 0))
    assert chip("TFRT cl/1", [0, 0, 0]) != chip("TFRT cl/2", [0, 0, 0])
    assert chip("TFRT cl/1", [0, 0, 0]) != chip("TFRT cl/1", [1, 0, 0])
