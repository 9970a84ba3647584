"""Where weights enter: files to canonical tensors (HuggingFace names, (out, in)).

Knows nothing of models or meshes: `read_tensors` yields names and host arrays.
"""

from jaxspec_checkpoints.bundled import bundled_draft, bundled_target
from jaxspec_checkpoints.huggingface import CheckpointError, read_tensors

__all__ = ["CheckpointError", "bundled_draft", "bundled_target", "read_tensors"]
