"""vLLM's place of what several endpoints share, for plugins."""
