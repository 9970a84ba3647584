"""The device side: pure functions, one jit.

Reading order: `plan` (what the host asks for), `state` (what the device keeps), `step`
(the program), `apply` and `active` (a plan's changes, and the rows that take part),
`round` (drafts, one target pass, the verdict), `region` (the tokens of a forward pass),
`history` (a sequence's own tokens, in pages), `propose`, `judge` and `accept` (the
verdict), `choose` and `sampling` (one token from one row of logits), `randomness`,
`commit`. What a request may ask for beyond that: `token_controls` and `controls`
(penalties, bias, masks), `grammar` (structured outputs), `token_logprobs`, `logprobs`.
"""
