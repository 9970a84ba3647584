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
from jaxspec.train.trainer import Schedule, Trainer
from tests.support.oracles import TINY, hf_tensors, make_hf_model, model_config

VOCAB, HIDDEN = int(TINY["vocab_size"]), int(TINY["hidden_size"])
DRAFT_VOCAB, LENGTH = 40, 12
IDS = np.arange(0, 2 * DRAFT_VOCAB, 2)
LAYER: dict[str, Any] = dict(target_hidden_size=HIDDEN, vocab_size=VOCAB)
LAYER |= dict(hidden_size=HIDDEN, intermediate_size=32)
LAYER |= dict(num_q_heads=4, num_kv_heads=2, head_dim=8)
LAYER |= dict(rms_norm_eps=1e-5, rope_theta=10000.0)


@cache
def reference(*, is_tied: bool = True) -> Any:
    return make_hf_model(sliding_window=3, tie_word_embeddings=is_tied)


@cache
def make_target(data: int = 1, model: int = 1, *, is_tied: bool = True) -> Target:
    """Return the target on `data * model` devices."""
    devices = np.array(jax.devices()[: data * model])
    mesh = Mesh(devices.reshape(data, 1, model), MESH_AXES)
    return target_of(reference(is_tied=is_tied), mesh)


def target_of(source: Any, mesh: Mesh, folder: Path = Path("nowhere")) -> Target:
    """Return a HuggingFace model as a target."""
    config, tensors = model_config(source), hf_tensors(source)
    options: dict[str, Any] = dict(dtype=jnp.dtype(jnp.float32), mesh=mesh)
    params = load_params(config, tensors, is_trained=True, **options)
    return Target(name="tiny", folder=folder, config=config, params=params, **options)


def make_trainer(
    method: Any,
    target: Target,
    *,
    read: Any = None,
    num_rows: int = 10,
    num_held_out: int = 4,
    work: Path | None = None,
    **schedule: Any,
) -> Trainer:
    """Return a trainer with rows of 4 texts; `read` may replace the target's pass."""
    run = target.reader(method.layers)
    read = read or (lambda numbers, tokens: run(tokens))
    is_trimmed = isinstance(method, DFlashMethod | Eagle3Method)
    return Trainer(
        method,
        target,
        make_text(num_rows),
        make_text(num_held_out, seed=1),
        schedule=Schedule(**{"rows": 4, "warmup_steps": 1, **schedule}),
        read_states=(read, read),
        token_ids=IDS if is_trimmed else None,
        work=work,
    )


def make_text(rows: int, seed: int = 0) -> Text:
    """Return documents in which the previous token mostly determines the next."""
    random = np.random.default_rng(seed)
    documents = []
    for _ in range(rows):
        ids = (random.integers(VOCAB) + 7 * np.arange(random.integers(8, 16))) % VOCAB
        documents.append((ids.tolist(), int(random.integers(0, 3))))
    return pack(documents, LENGTH)


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
