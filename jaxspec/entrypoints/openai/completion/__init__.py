"""Names of vLLM's `entrypoints.openai.completion`."""
