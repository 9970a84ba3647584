"""Heads: small networks on a target's hidden states, which propose drafts.

Reading order: `config` (what a folder says, and which target it is for), `eagle3`,
`eagle` and `medusa` (the networks, functions over a tree of parameters), `weights`
(declared, read, made, written), `module` (the same networks in Flax).
"""
