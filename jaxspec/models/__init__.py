"""The models: `batch` (what a forward pass is given), `gemma2`, `weights`."""
