"""Text to tokens and back, and the turns of a chat: `tokenizer`, then the others."""
