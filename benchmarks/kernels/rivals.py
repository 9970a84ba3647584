"""What a user would pick instead, given the same values in the form it wants.

Each rival is given every advantage: dense keys and values have no pages to look up and
no token outside the window, and what it cannot do (soft-capping, ragged lengths) it
need not do. One that does not fit raises NotImplementedError with the reason.
"""

import functools
import importlib
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from benchmarks.kernels.clock import Spread, measure
from benchmarks.kernels.work import Work

# What a library says when a shape, a type or a device is not for it.
REFUSALS = (
    ArithmeticError,
    AssertionError,
    ImportError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)

Rival = Callable[..., Spread]


def rivals_of(work: Work) -> dict[str, Rival]:
    """Return, by name, functions of (work, calls=, repeats=) that time one each."""
    if work.operation == "paged_attention":
        return {
            "jax pallas paged_attention": _jax_paged,
            "jax dot_product_attention, xla, dense": functools.partial(_dense, "xla"),
            "jax dot_product_attention, cudnn, dense": functools.partial(
                _dense, "cudnn"
            ),
            "torch scaled_dot_product_attention, dense": _torch,
        }
    if work.operation == "rejection_sampling":
        return {READ_ONCE: _read_once, "jax softmax, then categorical": _categorical}
    return {}


READ_ONCE = "maximum of the logits: read once"


def _heads(work: Work) -> tuple[Array, Array, Array]:
    """Query, keys and values with heads third: `[seq, token, head, head_dim]`."""
    case = work.case
    length = case.context
    if case.window is not None:
        length = min(length, case.window + case.queries - 1)
    shape = (case.seqs, length, case.kv_heads, case.head_dim)
    keys = jax.random.split(jax.random.key(1), 2)
    key = jax.random.normal(keys[0], shape, work.carry.dtype)
    return work.carry, key, jax.random.normal(keys[1], shape, work.carry.dtype)


def _jax_paged(work: Work, **timing: Any) -> Spread:
    case = work.case
    if case.queries > 1:
        raise NotImplementedError("it has one query per sequence")
    if case.window is not None:
        raise NotImplementedError("it has no sliding window")
    pages, table, kv_len = work.turns[0]
    platform = jax.default_backend()
    if platform == "tpu":
        module = importlib.import_module(
            "jax.experimental.pallas.ops.tpu.paged_attention"
        )
        given = {"pages_per_compute_block": 8}
    elif platform == "gpu":
        module = importlib.import_module(
            "jax.experimental.pallas.ops.gpu.paged_attention"
        )
        # Its own default of 8 needs more shared memory than an H200 has, at head_dim
        # 256.
        given = {"pages_per_compute_block": 4}
    else:
        raise NotImplementedError("it is for TPU and GPU")

    def step(query: Array, number: Array, key: Array, value: Array, *rest: Array):
        table, kv_len = rest
        query = query[:, 0] * jnp.asarray(case.scale, query.dtype)
        order = (kv_len, table) if platform == "tpu" else (table, kv_len)
        mixed = module.paged_attention(
            query, key, value, *order, attn_logits_soft_cap=case.soft_cap, **given
        )
        return mixed[:, None].astype(work.carry.dtype)

    used = case.seqs * table.shape[1]
    pages = pages[:used].transpose(2, 0, 1, 3)
    arrays = (pages[::2], pages[1::2], table, kv_len)
    return measure(step, work.carry, [arrays], **timing)


def _dense(
    implementation: Literal["xla", "cudnn"], work: Work, **timing: Any
) -> Spread:
    case = work.case
    if implementation == "cudnn" and jax.default_backend() != "gpu":
        raise NotImplementedError("it is for GPU")

    def step(query: Array, number: Array, key: Array, value: Array) -> Array:
        mask = None
        if case.queries > 1:
            last = key.shape[1] - case.queries
            seen = jnp.arange(key.shape[1], dtype=jnp.int32)[None]
            here = last + jnp.arange(case.queries, dtype=jnp.int32)[:, None]
            mask = (seen <= here)[None, None]
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            scale=case.scale,
            implementation=implementation,
        )

    query, key, value = _heads(work)
    return measure(step, query, [(key, value)], **timing)


def _torch(work: Work, *, calls: int, repeats: int) -> Spread:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise NotImplementedError("torch is not installed") from error
    if not torch.cuda.is_available():
        raise NotImplementedError("torch finds no CUDA device")
    case = work.case
    length = _heads(work)[1].shape[1]

    def heads(number: int, tokens: int) -> Any:
        shape = (case.seqs, number, tokens, case.head_dim)
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    query = heads(case.q_heads, case.queries)
    key, value = heads(case.kv_heads, length), heads(case.kv_heads, length)
    mask = None
    if case.queries > 1:
        mask = torch.ones(case.queries, length, dtype=torch.bool, device="cuda")
        mask = mask.tril(length - case.queries)
    attend = functools.partial(
        torch.nn.functional.scaled_dot_product_attention,
        attn_mask=mask,
        scale=case.scale,
        enable_gqa=True,
    )
    attend(query, key, value)
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            query = attend(query, key, value)
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / calls)
    return Spread.of(seconds)


def _read_once(work: Work, **timing: Any) -> Spread:
    def step(shift: Array, number: Array, logits: Array) -> Array:
        # The shift is always 0. It is in the sum so that no compiler reads ahead.
        best = (logits.astype(jnp.float32) + shift).max(axis=(0, 1, 2))
        return jnp.where(best > 1e30, 1.0, 0.0).astype(jnp.float32)

    turns = [arrays[:1] for arrays in work.turns]
    return measure(step, jnp.float32(0), turns, **timing)


def _categorical(work: Work, **timing: Any) -> Spread:
    def step(carry: Array, number: Array, logits: Array) -> Array:
        # Every row, as a sampler does that does not know which row it will need.
        probs = jax.nn.softmax(logits.astype(jnp.float32) + carry.min(), axis=-1)
        key = jax.random.key(number)
        tokens = jax.random.categorical(key, jnp.log(probs))
        return jnp.where(tokens < 0, 1.0, 0.0).astype(jnp.float32)

    turns = [arrays[:1] for arrays in work.turns]
    rows = jnp.zeros(turns[0][0].shape[:2], jnp.float32)
    return measure(step, rows, turns, **timing)
