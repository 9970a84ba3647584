"""vLLM's tests, with other helpers."""
