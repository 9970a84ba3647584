"""Training of heads and drafts: `python -m jaxspec.train METHOD --target TARGET ...`.

Reading order: `text` (what the target writes), `rows` (whole rows through a network),
`quality` (two forms of a model read the same rows), `target` (its hidden states,
recomputed or cached), `losses`, `methods` (what is trained, and what it predicts),
`trainer` (the loop, its checkpoints and its figures), `run` (all of it), `__main__`
(the command line).
"""
