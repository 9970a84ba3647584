"""A target of a few thousand parameters, and text for it."""

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.models.heads.config import (
    DFlashConfig,
    Eagle3Config,
    EagleConfig,
    MedusaConfig,
)
from jaxspec.models.weights import load_params
from jaxspec.sharding import MESH_AXES
from jaxspec.train.methods import (
    DFlashMethod,
    Eagle3Method,
    EagleMethod,
    MedusaMethod,
)
from jaxspec.train.target import Target
from jaxspec.train.text import Text, pack
from tests.support.oracles import TINY, hf_tensors, make_hf_model, model_config

VOCAB, HIDDEN = int(TINY["vocab_size"]), int(TINY["hidden_size"])
DRAFT_VOCAB, LENGTH = 40, 12


@cache
def reference(*, is_tied: bool = True) -> Any:
    return make_hf_model(sliding_window=3, tie_word_embeddings=is_tied)


@cache
def make_target(data: int = 1, model: int = 1, *, is_tied: bool = True) -> Target:
    """Return the target on `data * model` devices."""
    devices = np.array(jax.devices()[: data * model])
    mesh = Mesh(devices.reshape(data, 1, model), MESH_AXES)
    source = reference(is_tied=is_tied)
    config, tensors = model_config(source), hf_tensors(source)
    dtype = jnp.dtype(jnp.float32)
    return Target(
        name="tiny",
        folder=Path("nowhere"),
        config=config,
        params=load_params(config, tensors, dtype=dtype, mesh=mesh, is_trained=True),
        mesh=mesh,
        dtype=dtype,
    )


def make_text(rows: int, seed: int = 0) -> Text:
    """Return documents in which the previous token mostly determines the next."""
    random = np.random.default_rng(seed)
    documents = []
    for _ in range(rows):
        ids = (random.integers(VOCAB) + 7 * np.arange(random.integers(8, 16))) % VOCAB
        documents.append((ids.tolist(), int(random.integers(0, 3))))
    return pack(documents, LENGTH)


LAYER: dict[str, Any] = dict(target_hidden_size=HIDDEN, vocab_size=VOCAB)
LAYER |= dict(hidden_size=HIDDEN, intermediate_size=32)
LAYER |= dict(num_q_heads=4, num_kv_heads=2, head_dim=8)
LAYER |= dict(rms_norm_eps=1e-5, rope_theta=10000.0)


def eagle_method() -> EagleMethod:
    config = EagleConfig(**LAYER, draft_vocab_size=VOCAB)
    return EagleMethod(config=config, num_passes=2)


def eagle3_method(**changes: Any) -> Eagle3Method:
    own = dict(draft_vocab_size=DRAFT_VOCAB, target_layers=(1, 2, 4))
    sizes: dict[str, Any] = LAYER | own
    config: Any = Eagle3Config(**sizes | changes)
    return Eagle3Method(config=config, num_passes=2)


def dflash_method() -> DFlashMethod:
    config = DFlashConfig(
        **LAYER,
        draft_vocab_size=DRAFT_VOCAB,
        target_layers=(1, 2, 4),
        block_size=4,
        mask_token_id=3,
        windows=(None, 5),
        has_qk_norm=True,
        has_lm_head=True,
    )
    return DFlashMethod(config=config)


def medusa_method(*, lm_heads: int = 0) -> MedusaMethod:
    config = MedusaConfig(
        target_hidden_size=HIDDEN,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        num_heads=2,
        lm_heads=lm_heads,
    )
    return MedusaMethod(config=config)
