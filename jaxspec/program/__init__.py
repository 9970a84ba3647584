"""The device side: pure functions, one jit.

Reading order: `plan` (what the host asks for), `state` (what the device keeps), `step`
(the program), `apply` and `active` (a plan's changes, and the rows that take part),
`region` (the tokens of a forward pass), `propose`, `accept` (the verdict), `choose` and
`sampling` (one token from one row of logits), `randomness`, `commit`.
"""
