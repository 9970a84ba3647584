"""Layout of Gemma's Flax checkpoints, as published on Kaggle and by the gemma library.

Each canonical tensor is a `View` of one Flax array: an index, an order of the axes, and
the number of axes that are rows. Nothing is computed, so both directions are exact.
Knows names and shapes; `storage` reads and writes files.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from jaxspec_checkpoints.gemma.published import layer_shapes
from jaxspec_checkpoints.layout import Sizes
from jaxspec_checkpoints.storage import Slabs, StoredArray
from jaxspec_checkpoints.tensor import BLOCK_BYTES, Tensor

EMBEDDER = "embedder/input_embedding"
FINAL_NORM = "final_norm/scale"
GATING = "mlp/gating_einsum"
STACK = "stacked_layers/attention_type_"


@dataclass(frozen=True, kw_only=True)
class View:
    """Where one canonical tensor is in one Flax array.

    Attributes:
        leaf: Path of the array below the root of the tree.
        fixed: Index of the first axes.
        order: The other axes, counted from the first of them, in canonical order.
        row_axes: Number of leading axes in `order` that are combined to rows; the
            others are combined to columns.
    """

    leaf: str
    fixed: tuple[int, ...] = ()
    order: tuple[int, ...]
    row_axes: int = 1

    @property
    def axis(self) -> int:
        """The array's axis along which rows are read."""
        return len(self.fixed) + self.order[0]

    def step(self, shape: tuple[int, ...]) -> int:
        """Return the number of rows at an index of `axis`: head_dim or 1."""
        sizes = [shape[len(self.fixed) + axis] for axis in self.order]
        return math.prod(sizes[1 : self.row_axes])

    def rows(self, slab: np.ndarray) -> np.ndarray:
        """Turn a slab of the array, without the fixed axes, into canonical rows."""
        turned = slab.transpose(self.order)
        num_rows = math.prod(turned.shape[: self.row_axes])
        columns = math.prod(turned.shape[self.row_axes :])
        return turned.reshape((num_rows, columns)[: len(self.order)])

    def slab(self, rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Undo `rows`, for an array of `shape`."""
        sizes = [shape[len(self.fixed) + axis] for axis in self.order]
        turned = rows.reshape(len(rows) // self.step(shape), *sizes[1:])
        return turned.transpose(np.argsort(self.order))

    def index(self, start: int, stop: int) -> tuple[int | slice, ...]:
        """Return the index of the slab `[start, stop)` of `axis` in the array."""
        index: list[int | slice] = [*self.fixed, *[slice(None)] * len(self.order)]
        index[self.axis] = slice(start, stop)
        return tuple(index)

    def chunks(self, shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
        """Return a chunk shape with cheap reads of rows: slabs of `BLOCK_BYTES`."""
        sizes = [1] * len(self.fixed) + list(shape[len(self.fixed) :])
        length = sizes[self.axis]
        slab_bytes = max(1, math.prod(sizes) // length * itemsize)
        sizes[self.axis] = min(length, max(1, BLOCK_BYTES // slab_bytes))
        return tuple(sizes)

    def tensor(self, array: StoredArray, num_rows: int | None = None) -> Tensor:
        """Describe the canonical tensor in `array`; `num_rows` cuts off padding."""
        sizes = [array.shape[len(self.fixed) + axis] for axis in self.order]
        rows = math.prod(sizes[: self.row_axes]) if num_rows is None else num_rows
        columns = math.prod(sizes[self.row_axes :])
        step = self.step(array.shape)
        length = math.ceil(rows / step)
        slabs = Slabs(array, self.axis, self.fixed, length=length)

        def read(start: int, stop: int) -> np.ndarray:
            first = start // step
            values = self.rows(slabs.read(first, math.ceil(stop / step)))
            return values[start - first * step : stop - first * step]

        return Tensor(
            shape=(rows, columns)[: len(self.order)],
            dtype=array.dtype,
            source=array.source,
            read=read,
        )


# (name within a canonical layer, name within a Flax layer)
_NORMS = {
    "input_layernorm.weight": "pre_attention_norm/scale",
    "post_attention_layernorm.weight": "post_attention_norm/scale",
    "pre_feedforward_layernorm.weight": "pre_ffw_norm/scale",
    "post_feedforward_layernorm.weight": "post_ffw_norm/scale",
}
QUERY_NORM = "attn/_query_norm/scale"
_QK_NORMS = {
    "self_attn.q_norm.weight": QUERY_NORM,
    "self_attn.k_norm.weight": "attn/_key_norm/scale",
}


def _layer_views(is_model_first: bool) -> dict[str, View]:
    # (head, model, head_dim) -> (head x head_dim, model)
    heads = View(leaf="attn/q_einsum/w", order=(0, 2, 1), row_axes=2)
    keys = replace(heads, leaf="attn/kv_einsum/w", fixed=(0,))
    gate = View(leaf=GATING, fixed=(0,), order=(1, 0) if is_model_first else (0, 1))
    norms = {
        ours: View(leaf=theirs, order=(0,))
        for ours, theirs in (_NORMS | _QK_NORMS).items()
    }
    return norms | {
        "self_attn.q_proj.weight": heads,
        "self_attn.k_proj.weight": keys,
        "self_attn.v_proj.weight": replace(keys, fixed=(1,)),
        # (head, head_dim, model) -> (model, head x head_dim)
        "self_attn.o_proj.weight": View(leaf="attn/attn_vec_einsum/w", order=(2, 0, 1)),
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": replace(gate, fixed=(1,)),
        "mlp.down_proj.weight": View(leaf="mlp/linear", order=(1, 0)),
    }


def views(
    sizes: Sizes,
    *,
    is_model_first: bool,
    num_stacks: int = 0,
    has_qk_norm: bool = False,
) -> dict[str, View]:
    """Return the view of each canonical tensor.

    Args:
        is_model_first: `gating_einsum` is (2, model, hidden), not (2, hidden, model).
        num_stacks: Number of stacks of layers; layer i is in stack i % num_stacks. 0 if
            each layer has arrays of its own.
        has_qk_norm: Whether heads of queries and keys are normalized.
    """
    layer_views = _layer_views(is_model_first)
    found = {"model.embed_tokens.weight": View(leaf=EMBEDDER, order=(0, 1))}
    for layer in range(sizes.num_layers):
        for name in layer_shapes(sizes, has_qk_norm=has_qk_norm):
            view = layer_views[name]
            if num_stacks:
                place, stack = divmod(layer, num_stacks)
                leaf, fixed = f"{STACK}{stack}/{view.leaf}", (place, *view.fixed)
            else:
                leaf, fixed = f"layer_{layer}/{view.leaf}", view.fixed
            found[f"model.layers.{layer}.{name}"] = replace(
                view, leaf=leaf, fixed=fixed
            )
    return found | {"model.norm.weight": View(leaf=FINAL_NORM, order=(0,))}


def leaf_shapes(
    sizes: Sizes,
    *,
    num_rows: int,
    is_model_first: bool,
    num_stacks: int = 0,
    has_qk_norm: bool = False,
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every array of a tree by its path; arguments as in `views`.

    Args:
        num_rows: Rows of the embedding, including padding.
    """
    model, hidden = sizes.hidden_size, sizes.intermediate_size
    heads, dim = sizes.num_q_heads, sizes.head_dim
    layer = {name: (model,) for name in _NORMS.values()} | {
        "attn/q_einsum/w": (heads, model, dim),
        "attn/kv_einsum/w": (2, sizes.num_kv_heads, model, dim),
        "attn/attn_vec_einsum/w": (heads, dim, model),
        GATING: (2, model, hidden) if is_model_first else (2, hidden, model),
        "mlp/linear": (hidden, model),
    }
    if has_qk_norm:
        layer |= dict.fromkeys(_QK_NORMS.values(), (dim,))
    shapes = {EMBEDDER: (num_rows, model), FINAL_NORM: (model,)}
    for number in range(num_stacks or sizes.num_layers):
        if num_stacks:
            length = len(range(number, sizes.num_layers, num_stacks))
            prefix, stacked = f"{STACK}{number}", (length,)
        else:
            prefix, stacked = f"layer_{number}", ()
        for part, shape in layer.items():
            shapes[f"{prefix}/{part}"] = (*stacked, *shape)
    return shapes
