"""The device side: pure functions, one jit.

Reading order: `plan` (what the host requests), `wire` (the plan's vector, and the
result's), `tree` (the drafts of a sequence, and their verdict), `rows` and `state`
(arrays kept on the device), `step_context` (one launch), `step` (the program) and
`executable_args` (its arguments), `propose` (draft tokens), `target_pass`,
`token_batch` (tokens of a pass), `history` (known tokens, in pages), `verify` (the
verdict on a chain), `sampling` (draft sampling), `randomness`. Optional parts:
`controls` (penalties, bias, masks), `grammar` (structured outputs), `logprobs`.
"""
