"""Response bodies: the engine's outputs in the format of OpenAI's API.

`completions`, `chat_completions` and `responses` write the three kinds of responses.
`response_writers` has their base classes, `response_items` the items of the third kind,
`logprobs` and `usage` common parts.
"""
