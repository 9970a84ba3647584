"""Alias of `jaxspec.serve`, where vLLM has its server."""

import sys

from jaxspec.serve.__main__ import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m jaxspec.entrypoints.openai.api_server"))
