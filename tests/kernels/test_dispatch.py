"""A named implementation runs or is an error; None selects the platform's own."""

import logging
import subprocess
import sys

import jax
import pytest

from jaxspec_kernels import dispatch, native
from jaxspec_kernels.paged_attention import cpu, gpu, reference, tpu

OPERATION = "paged_attention"
ALL = {"reference": "reference", "cpu": "cpu", "tpu": "tpu", "gpu": "gpu"}


@pytest.fixture(autouse=True)
def _forget_choices():
    dispatch._log_choice.cache_clear()


@pytest.mark.parametrize(
    ("platform", "is_native", "module"),
    [
        ("cpu", True, cpu),
        ("cpu", False, reference),
        ("tpu", False, tpu),
        ("gpu", False, gpu),
    ],
)
def test_none_selects_the_default_backend(platform, is_native, module, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(native, "is_available", lambda: is_native)
    assert dispatch.choose(OPERATION, ALL, None) is module.paged_attention


def test_described_gpus_have_platform_cuda():
    assert dispatch.implementation_for("cuda") == "gpu"


def test_error_for_unknown_platform_names_the_reference():
    expected = "no kernels for platform 'METAL', .*'reference' runs on every platform"
    with pytest.raises(NotImplementedError, match=expected):
        dispatch.implementation_for("METAL")


@pytest.mark.parametrize(
    ("available", "name", "module"),
    [
        (ALL, "reference", reference),
        (ALL, "tpu", tpu),
        (ALL, "gpu", gpu),
        ({"reference": "reference", "tpu": "reference"}, "tpu", reference),
    ],
)
def test_named_implementation_is_used(available, name, module):
    assert dispatch.choose(OPERATION, available, name) is module.paged_attention


@pytest.mark.parametrize("name", ["pallas", "", "Reference"])
def test_error_for_unknown_name_lists_allowed_names(name):
    expected = "of paged_attention: choose one of reference, cpu, tpu, gpu"
    with pytest.raises(ValueError, match=expected):
        dispatch.choose(OPERATION, ALL, name)


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("name", ["tpu", "gpu"])
def test_missing_implementation_is_not_replaced(name, is_named, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: name)
    expected = f"paged_attention has no '{name}' implementation; available: reference"
    with pytest.raises(NotImplementedError, match=expected):
        dispatch.choose(
            OPERATION, {"reference": "reference"}, name if is_named else None
        )


def test_choice_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(native, "is_available", lambda: False)
    with caplog.at_level(logging.INFO, "jaxspec_kernels"):
        for _ in range(3):
            dispatch.choose(OPERATION, ALL, None)
        dispatch.choose(OPERATION, ALL, "tpu")
    assert [record.getMessage() for record in caplog.records] == [
        "paged_attention: reference implementation",
        "paged_attention: tpu implementation",
    ]


def test_pallas_is_not_imported_on_cpu():
    code = "import sys, jaxspec_kernels\n"
    code += "assert 'jax.experimental.pallas' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
