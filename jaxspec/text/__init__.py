"""Text to tokens and back, and the turns of a chat.

Reading order: `tokenizer`, `pieces` (what its files hold), `chat_turns`,
`chat_template`, `tools` (how a model is told of tools, and calls them).
"""
