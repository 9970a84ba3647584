"""Gemma 2: `published` (tensors, sizes), `flax_layout` and `flax_tree` (Kaggle's)."""
