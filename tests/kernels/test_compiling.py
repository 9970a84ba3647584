"""Flags of the libraries that a wheel ships.

Apart from the tests of operations, which run once more with other flags.
"""

import platform
import re
import subprocess

import pytest

from jaxspec_kernels import native
from jaxspec_kernels.native import compiling

NAMES = [variant.name for variant in compiling.VARIANTS["x86_64"]]
# Macros of instructions, and the flags of /proc/cpuinfo that are spelled differently.
SPELLED = {
    "bmi": "bmi1",
    "lzcnt": "abm",
    "avx512bf16": "avx512_bf16",
}
INSTRUCTIONS = (
    "SSSE3 SSE4_2 POPCNT LZCNT MOVBE BMI BMI2 F16C FMA AVX AVX2 AVX512F "
    "AVX512BW AVX512CD AVX512DQ AVX512VL AVX512BF16 AMX_TILE AMX_BF16".split()
)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
@pytest.mark.parametrize("variant", compiling.VARIANTS["x86_64"], ids=NAMES)
def test_shipped_library_needs_all_instructions_of_its_flags(variant):
    """The compiler defines a macro for each set of instructions that it may use."""
    command = [
        native._compiler(),
        *variant.flags,
        "-dM",
        "-E",
        "-x",
        "c++",
        "/dev/null",
    ]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    defined = set(re.findall(r"^#define __(\w+)__ 1$", output, re.MULTILINE))
    names = [name.lower() for name in INSTRUCTIONS if name in defined]
    needs = {SPELLED.get(name, name) for name in names}
    assert needs == variant.needs - {"cx16"}
