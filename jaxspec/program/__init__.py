"""The device side: pure functions, one jit.

Reading order: `plan` (what the host asks for), `state` (what the device keeps), `step`
(the program), `propose`, `verify`, `sampling`, `randomness`, `commit`.
"""
