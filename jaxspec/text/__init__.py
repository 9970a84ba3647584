"""Tokenization and chat formats.

Reading order: `tokenizer`, `pieces` (vocabularies and their files), `chat_turns`,
`chat_template`, `tools` (tools in the prompt, and tool calls).
"""
