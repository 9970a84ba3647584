"""What clients send.

Reading order: `protocol` (bodies, checked), `params` (what they ask of sampling),
`response_input` (that of a response is a chat), `tool_choice` (what a chat may call)
and `tool_parsers` (what finds calls in answers).
"""
