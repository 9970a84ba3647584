"""Reads and writes model checkpoints: every format is read into one canonical form.

Reading order: `tensor` and `layout` (the canonical form), `gemma` (the families that
this package knows), `checkpoint` (a whole model), `reading` (detects the format), one
module per format, `placement` (puts weights on devices; the only module that imports
jax, and not imported here). `sources` turns names of models into folders and is the
only module that uses the network; it imports the services' libraries on use.
"""

from jaxspec_checkpoints.bundled import (
    BUNDLED_KINDS,
    bundled_draft,
    bundled_head,
    bundled_target,
    packaged_gemma3,
)
from jaxspec_checkpoints.checkpoint import Checkpoint
from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.gemma.published import tensor_shapes
from jaxspec_checkpoints.layout import Layout, Sizes, check_tensors
from jaxspec_checkpoints.reading import (
    lists_head,
    model_files,
    open_checkpoint,
    read_config,
)
from jaxspec_checkpoints.tensor import Tensor, in_memory

__all__ = [
    "BUNDLED_KINDS",
    "Checkpoint",
    "CheckpointError",
    "Layout",
    "Sizes",
    "Tensor",
    "bundled_draft",
    "bundled_head",
    "bundled_target",
    "check_tensors",
    "in_memory",
    "lists_head",
    "model_files",
    "open_checkpoint",
    "packaged_gemma3",
    "read_config",
    "tensor_shapes",
]
