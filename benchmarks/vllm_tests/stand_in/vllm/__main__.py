"""`python -m vllm` runs jaxspec."""

from jaxspec.__main__ import script

script()
