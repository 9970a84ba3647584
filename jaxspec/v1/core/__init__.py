"""Names of vLLM's `v1.core`."""
