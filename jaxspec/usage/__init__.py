"""vLLM's import path for usage reports; jaxspec sends none."""
