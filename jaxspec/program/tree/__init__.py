"""Draft trees on the device.

Reading order: `tree` (which draft continues which), `verify` (the verdict on a tree),
`compact_kv` (keys and values of the accepted drafts).
"""
