"""The device side: pure functions, one jit.

Reading order: `plan` (what the host asks for), `wire` (how it travels, and the result
back), `tree` (the drafts of a sequence), `rows` and `state` (what the
device keeps), `step` (the program) and `call` (what it is given), `propose` (who
drafts, and how), `forward` (the target's pass), `region` (its tokens), `history` (a
sequence's own tokens, in pages), `verify` (the verdict), `walk` and `path` (drafts of a
tree beside the first choices), `sampling` (a draft's token), `randomness`. What a
request may ask for beyond that: `controls` (penalties, bias, masks), `grammar`
(structured outputs), `logprobs`.
"""
