"""vLLM's place of what chats are asked with, for plugins."""
