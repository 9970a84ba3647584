"""Alias of `jaxspec.serve`, where vLLM has its server."""

from jaxspec.exit import end
from jaxspec.serve.__main__ import main

if __name__ == "__main__":
    end(main(prog="python -m jaxspec.entrypoints.openai.api_server"))
