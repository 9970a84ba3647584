"""Gemma 2 and 3: `published` (tensors, sizes), `flax_layout`, `flax_tree` (Kaggle)."""
