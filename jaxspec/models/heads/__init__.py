"""Heads: small networks on a target's hidden states, which propose drafts.

Reading order: `config` (a folder's config, and the target it is for), `eagle3`,
`eagle`, `dflash` and `medusa` (the networks, functions over a tree of parameters),
`weights` (parameters are declared, read, made, written), `module` (some networks in
Flax).
"""
