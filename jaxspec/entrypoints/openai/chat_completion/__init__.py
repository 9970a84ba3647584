"""vLLM's import path for the schemas of chat requests, for plugins."""
