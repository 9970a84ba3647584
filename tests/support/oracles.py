"""HuggingFace models as oracles, and our network without an engine."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
)

from jaxspec.config.engine import ModelConfig
from jaxspec.models.backend import Backend
from jaxspec.models.batch import Region, TokenBatch
from jaxspec.models.families import config_from_hf
from jaxspec.models.network import build_network
from jaxspec.models.params import Params
from jaxspec.models.weights import load_params
from jaxspec.program.plan import PoolShape
from jaxspec.sharding import (
    TARGET_MESH_AXES,
    kv_copies,
    make_mesh,
    num_parts,
    replicated,
)
from jaxspec_checkpoints import Tensor, in_memory
from tests.support.sizes import TINY


def forms_of(params: Any) -> Any:
    """Return the shape, type and sharding of each leaf, and the tree's structure."""
    leaves = jax.tree.leaves(params)
    forms = [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves]
    return forms, jax.tree.structure(params)


def sequence_batch(
    tokens: Any, pages: Any, *, page_size: int = 4, start: int = 0
) -> TokenBatch:
    """Return consecutive tokens of one sequence, the first at position `start`.

    Args:
        pages: The sequence's pages, in order.
    """
    positions = np.arange(start, start + len(tokens))
    table = np.asarray(pages, np.int32)
    slots = table[positions // page_size] * page_size + positions % page_size
    region = Region(
        page_table=jnp.asarray(table[None]),
        kv_len=jnp.array([start + len(tokens)], jnp.int32),
        num_queries=len(tokens),
    )
    return TokenBatch(
        tokens=jnp.asarray(tokens, jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        slot_mapping=jnp.asarray(slots, jnp.int32),
        regions=(region,),
    )


def make_hf_model(seed: int = 0, sharpness: float = 3.0, **changes: Any) -> Any:
    """Make a random float32 Gemma 2 whose soft caps and windows take effect.

    Args:
        sharpness: Multiplies the matrices. HuggingFace's 0.02 leaves scores near
            zero, where neither a soft cap nor a window has an effect.
    """
    given: dict[str, Any] = TINY | changes | {"attn_implementation": "eager"}
    torch.manual_seed(seed)
    return _sharpen(Gemma2ForCausalLM(Gemma2Config(**given)), sharpness)


# All special features have an effect: one KV head, scaled positions only in the one
# global layer of the first six, a window shorter than prompts, a query scalar other
# than the head size, and layers after the last whole period.
TINY_GEMMA3: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=16,
    query_pre_attn_scalar=7,
    sliding_window=8,
    sliding_window_pattern=6,
    rope_theta=1000.0,
    rope_local_base_freq=100.0,
    rope_scaling={"rope_type": "linear", "factor": 8.0},
    max_position_embeddings=512,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=2,
)


def make_gemma3(seed: int = 0, sharpness: float = 2.0, **changes: Any) -> Any:
    """Make a random float32 Gemma 3 whose window, rotations and norms take effect."""
    given: dict[str, Any] = TINY_GEMMA3 | changes | {"attn_implementation": "eager"}
    torch.manual_seed(seed)
    return _sharpen(Gemma3ForCausalLM(Gemma3TextConfig(**given)), sharpness)


def _sharpen(model: Any, sharpness: float) -> Any:
    """Replace all parameters by random float32 values."""
    model = model.float().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim == 2:
                scale = sharpness / value.shape[1] ** 0.5
                value.copy_(torch.randn_like(value) * scale)
            else:
                value.copy_(torch.randn_like(value) * 0.3)
            if name.endswith("embed_tokens.weight"):
                value.copy_(value / sharpness)
    return model


def hf_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Return the logits of every position of one sequence, `[token, vocab]`."""
    with torch.no_grad():
        return model(torch.tensor(tokens)[None].long()).logits[0].numpy()


def hf_tensors(model: Any) -> dict[str, Tensor]:
    """Return the model's weights under canonical names."""
    named = model.named_parameters()
    return in_memory({name: value.detach().numpy() for name, value in named})


def model_config(model: Any, **changes: Any) -> ModelConfig:
    """Return our config of a HuggingFace model; `changes` override its fields."""
    return dataclasses.replace(config_from_hf(model.config.to_dict()), **changes)


def init_kv_pages(
    config: ModelConfig, num_pages: int, page_size: int, dtype: Any, copies: int = 1
) -> tuple[jax.Array, ...]:
    """Return zeroed pages, one array per pool, with `copies` of every KV head."""
    heads = copies * config.num_kv_heads
    shape = (page_size, 2 * heads, config.head_dim)
    return tuple(
        jnp.zeros((count * num_pages, *shape), dtype)
        for count in config.layers_of_pools
    )


@dataclass
class PagedModel:
    """Runs our network on one sequence in pages, whose unused slots hold NaN."""

    config: ModelConfig
    params: Params
    page_size: int = 4
    num_pages: int = 64
    compiler_options: dict[str, Any] | None = None

    def __post_init__(self):
        table = self.params["embedding"]
        self.mesh = jax.tree.leaves(table)[0].sharding.mesh
        copies = kv_copies(
            self.config.num_q_heads,
            self.config.num_kv_heads,
            num_parts(self.mesh, TARGET_MESH_AXES),
        )
        pages = init_kv_pages(
            self.config, self.num_pages, self.page_size, table.dtype, copies
        )
        # Sharded like the results of `forward`: otherwise its second call would
        # recompile.
        whole = replicated(self.mesh)
        self.kv_pages = tuple(
            jax.device_put(jnp.full_like(layer, jnp.nan), whole) for layer in pages
        )
        order = np.random.default_rng(0).permutation(self.num_pages)
        self.page_table = order[None].astype(np.int32)
        self.length = 0
        self.num_traces = 0
        self.forward = jax.jit(
            self._forward, out_shardings=whole, compiler_options=self.compiler_options
        )

    @property
    def pool(self) -> PoolShape:
        """The shape of these pages, with one row."""
        return PoolShape(
            num_rows=1,
            num_pages=self.num_pages,
            page_size=self.page_size,
            max_model_len=self.num_pages * self.page_size,
            vocab_size=self.config.vocab_size,
        )

    def _forward(self, params, batch, kv_pages):
        self.num_traces += 1
        backend = Backend(mesh=self.mesh, mesh_axes=TARGET_MESH_AXES)
        model = build_network(self.config, params, backend)
        output, kv_pages = model.forward(batch, kv_pages)
        return model.logits(output.hidden_states), kv_pages

    def run(self, tokens: np.ndarray, pads: int = 0) -> np.ndarray:
        """Append tokens after `pads` padding rows; return the logits of the tokens."""
        count = len(tokens)
        positions = np.arange(self.length - pads, self.length + count)
        slots = self.page_table[0][np.maximum(positions, 0) // self.page_size]
        slots = slots * self.page_size + positions % self.page_size
        slots[:pads] = self.num_pages * self.page_size
        self.length += count
        region = Region(
            page_table=jnp.asarray(self.page_table),
            kv_len=jnp.array([self.length], jnp.int32),
            num_queries=pads + count,
        )
        batch = TokenBatch(
            tokens=jnp.asarray(np.r_[np.zeros(pads, np.int32), tokens], jnp.int32),
            positions=jnp.asarray(positions, jnp.int32),
            slot_mapping=jnp.asarray(slots, jnp.int32),
            regions=(region,),
        )
        logits, self.kv_pages = self.forward(self.params, batch, self.kv_pages)
        return np.asarray(logits)[pads:]


def load_ours(
    model: Any,
    *,
    shards: int = 1,
    dtype: Any = jnp.float32,
    scan_layers: bool = False,
) -> Params:
    """Return a HuggingFace model's weights as our parameters, on `shards` devices."""
    return load_params(
        model_config(model, scan_layers=scan_layers),
        hf_tensors(model),
        dtype=jnp.dtype(dtype),
        mesh=make_mesh(shards),
    )
