"""Programs and texts are the same whatever jax settings the user has made."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import pytest

from jaxspec.engine.program_cache import ProgramCache
from jaxspec.errors import ConfigError
from jaxspec.jax_settings import OWN_SETTINGS, find_devices, own_settings
from jaxspec.program.plan import StepShape
from jaxspec.program.step import lower_step
from jaxspec.sampling_params import SamplingParams
from tests.support import pair
from tests.support.engines import OneProgramRunner, generate, tokens_of

OTHER_SETTINGS: dict[str, Any] = {
    "enable_x64": True,
    "disable_jit": True,
    "default_matmul_precision": "bfloat16",
    "default_device": "cpu:1",
    "default_prng_impl": "rbg",
    "threefry_partitionable": False,
    "enable_custom_prng": True,
    "legacy_prng_key": "error",
    "softmax_custom_jvp": False,
    "debug_nans": True,
    "debug_infs": True,
    "check_tracer_leaks": True,
    "transfer_guard": "disallow",
}
PROMPTS = [[2, 5, 7, 9], [2, 9, 4, 11]]


@contextmanager
def other_settings() -> Iterator[None]:
    with ExitStack() as stack:
        for name, value in OTHER_SETTINGS.items():
            if name == "default_device":
                value = jax.devices()[1]
            stack.enter_context(getattr(jax, name)(value))
        yield


def test_every_setting_is_tested_with_other_values():
    assert OTHER_SETTINGS.keys() == OWN_SETTINGS.keys()


def test_settings_of_the_user_are_restored():
    with jax.enable_x64(True):
        with own_settings():
            assert not jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        assert jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]


def test_programs_are_the_same_under_other_settings(tmp_path):
    runner = pair.engine().runner
    shape = StepShape(num_seqs=2, num_levels=pair.NUM_DRAFT, max_prompt_tokens=32)
    arguments = (*runner.params, runner.state)

    def made() -> tuple[str, Any]:
        lowered = lower_step(runner.program, shape, arguments)
        name = ProgramCache(tmp_path).path(runner.program, shape, arguments)
        return lowered.as_text(), name

    expected = made()
    with other_settings():
        assert made() == expected


@pytest.mark.slow
def test_texts_are_the_same_under_other_settings():
    params = [
        SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
        SamplingParams(
            temperature=1, seed=3, max_tokens=16, ignore_eos=True, logprobs=2
        ),
    ]
    expected = tokens_of(generate(pair.plain_engine(), PROMPTS, params))
    with other_settings():
        engine = pair.own_engine(runner=OneProgramRunner)
        assert tokens_of(generate(engine, PROMPTS, params)) == expected
        assert engine.stats.num_accepted_tokens > 0
        engine.sleep(1)
        engine.wake_up()
        assert tokens_of(generate(engine, PROMPTS, params)) == expected


def test_error_names_a_platform_that_cannot_start(monkeypatch):
    def fail() -> None:
        raise AssertionError

    monkeypatch.setattr(jax, "devices", fail)
    with pytest.raises(ConfigError, match="JAX_PLATFORMS='cpu': no device was found"):
        find_devices()
