"""What clients get: the engine's outputs, written as OpenAI's API does.

`completions`, `chat_completions` and `responses` are the three kinds of answers;
`response_writers` is what the first two share, `response_items` of what the third is
made. `logprobs` and `usage` are parts of them.
"""
