"""The jax settings of our programs, whatever the user has set.

A user may set `jax_enable_x64` or `jax_disable_jit` for other code in the process. Some
of these change results, others break tracing. Programs are traced, compiled and called
under the settings below, for one thread and one block at a time.

jax's checks for strict dtype promotion, rank promotion and reuse of keys are not set
here: all tests run with them, so programs are known to pass them.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax

from jaxspec.errors import ConfigError

# Values by the names of jax's context managers. They are the same for every program, so
# program caches do not include them in their keys.
OWN_SETTINGS: dict[str, Any] = {
    "enable_x64": False,
    "disable_jit": False,
    "default_matmul_precision": None,
    "default_device": None,
    "default_prng_impl": "threefry2x32",
    "threefry_partitionable": True,
    "enable_custom_prng": False,
    "legacy_prng_key": "allow",
    "softmax_custom_jvp": True,
    # The engine reports NaN per request, and logits have infinities on purpose.
    "debug_nans": False,
    "debug_infs": False,
    # This check would report objects that a trace keeps on purpose, such as a grammar
    # callback.
    "check_tracer_leaks": False,
    "transfer_guard": "allow",
}


@contextmanager
def own_settings() -> Iterator[None]:
    """Apply our settings in this thread, and restore the user's afterwards.

    Takes about 20 us. Can also be used as a decorator.
    """
    with ExitStack() as stack:
        for name, value in OWN_SETTINGS.items():
            stack.enter_context(getattr(jax, name)(value))
        yield


def find_devices() -> list[Any]:
    """Return `jax.devices()`.

    Raises:
        ConfigError: jax cannot use the platform that JAX_PLATFORMS names.
    """
    try:
        return jax.devices()
    # jax raises AssertionError if its plugin is installed and finds no GPU.
    except (RuntimeError, AssertionError) as error:
        named = jax.config.values["jax_platforms"]
        reason = str(error).partition(" (set JAX_PLATFORMS")[0].rstrip(".")
        reason = reason or "no device was found"
        raise ConfigError(
            f"jax cannot start with JAX_PLATFORMS={named or ''!r}: {reason}. Set it "
            "to a platform of this machine (cpu, cuda, tpu), or unset it to let jax "
            "choose.",
            parameter="JAX_PLATFORMS",
            value=named,
        ) from error
