"""vLLM's import path for schemas that several endpoints share, for plugins."""
