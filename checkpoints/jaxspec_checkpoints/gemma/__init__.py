"""Gemma 2 and 3: `published` (tensors, sizes), `flax_layout` and `flax_tree` (Kaggle's)."""
