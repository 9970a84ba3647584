"""Import paths of vLLM; `jaxspec.serve` is what they lead to."""
