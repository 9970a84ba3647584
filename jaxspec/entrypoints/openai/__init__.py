"""vLLM's import paths of the server, which lead to `jaxspec.serve`."""
