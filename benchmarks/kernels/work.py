"""Makes the arrays of cases on the device, and calls of kernels over them.

The benchmark and the tuner time the same calls. Slots that no query attends to hold
NaN, so that an implementation that reads such a slot gives a wrong result.

Rivals are other libraries' implementations. They get the same values in their own
layout, and every advantage: their dense keys and values need no page lookup and have no
tokens outside the window. Soft-capping and ragged lengths are left out if the rival
does not support them. A rival that cannot run a case raises NotImplementedError with
the reason.
"""

import functools
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from benchmarks.kernels.clock import Arrays, Spread, measure
from jaxspec_kernels import paged_attention, tuning, write_kv_pages
from jaxspec_kernels.paged_attention import cases as attention_cases
from jaxspec_kernels.rejection_sampling import (
    STANDARD,
    SamplingValues,
    rejection_sampling,
)
from jaxspec_kernels.rejection_sampling import cases as sampling_cases
from jaxspec_kernels.write_kv_pages import cases as writing_cases

# Bytes of the page pool: many times a GPU's L2 cache. Every call of a loop reads
# different pages, because in a model a layer does not find its pages in the cache
# either.
POOL_BYTES = 2**28
# Bytes of all arrays of logits together, and their maximum number. Consecutive calls of
# the loop read different arrays.
LOGIT_BYTES, MAX_TURNS = 2**27, 16
# Temperature and top-p.
CONTROLS = {"sampled": (0.8, 1.0), "greedy": (0.0, 1.0), "top-p": (0.8, 0.95)}
# Errors that a library raises if it does not support a shape, a type or the device.
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
READ_ONCE = "maximum of the logits: read once"

Rival = Callable[..., Spread]


@dataclass(frozen=True, kw_only=True)
class Work:
    """One case on the device.

    Attributes:
        run: The public function of the operation; takes `implementation`.
        call: `call(run, carry, number, *arrays)` is the result of call `number`.
        follow: `follow(carry, result)` is the carry of the next call, which makes each
            call depend on the one before, so that no compiler can omit a call or run
            two at once.
        turns: The arrays of consecutive calls, all of the same shapes.
        num_bytes: Bytes that every implementation must read or write.
        error: Returns the largest difference of two results; for verdicts and copied
            values, the number of values that differ.
        tolerance: Largest error that rounding can cause.
    """

    operation: str
    case: Any
    run: Callable[..., Any]
    call: Callable[..., Any]
    follow: Callable[[Any, Any], Any]
    carry: Any
    turns: tuple[Arrays, ...]
    num_bytes: int
    error: Callable[[Any, Any], float]
    tolerance: float

    def step(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return `step(carry, number, *arrays)`, one call of a loop."""

        def step(carry: Any, number: Array, *arrays: Any) -> Any:
            return self.follow(carry, self.call(run, carry, number, *arrays))

        return step

    def result(self, run: Callable[..., Any]) -> Any:
        """Run the call once, compiled."""
        call = jax.jit(functools.partial(self.call, run))
        return call(self.carry, jnp.int32(0), *self.turns[0])


def attention_key(case: attention_cases.Case, dtype: str) -> str:
    """Return the name of a case's shapes in a tuned table."""
    pages = -(-case.context // case.page_size)
    return tuning.attention_key(
        seqs=case.seqs,
        queries=case.queries,
        q_heads=case.q_heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        page_size=case.page_size,
        context=pages * case.page_size,
        window=case.window,
        dtype=dtype,
    )


def sampling_key(case: sampling_cases.Case, dtype: str) -> str:
    """Return the name of a case's shapes in a tuned table."""
    rows = case.seqs * (case.drafts + 1)
    return tuning.sampling_key(
        rows=rows, columns=case.columns // case.shards, dtype=dtype
    )


def attention(
    case: attention_cases.Case,
    dtype: DTypeLike,
    *,
    is_ragged: bool = False,
    pool_bytes: int = POOL_BYTES,
) -> Work:
    """Make sequences of full length, or of all lengths, in pages of random order."""
    dtype = jnp.dtype(dtype)
    table_len = -(-case.context // case.page_size)
    used = case.seqs * table_len
    page_bytes = 2 * case.page_size * case.kv_heads * case.head_dim * dtype.itemsize
    copies = 1 if is_ragged else max(1, -(-pool_bytes // (used * page_bytes)))
    share = jnp.arange(1, case.seqs + 1, dtype=jnp.int32)
    kv_len = jnp.full_like(share, case.context)
    if is_ragged:
        kv_len = case.context * share // case.seqs - share + 1
    query, pages, table = _attention_arrays(case, dtype, copies, kv_len)
    first, end = _page_range(case, kv_len)

    def call(
        run: Any, query: Array, number: Array, pages: Array, *rest: Array
    ) -> Array:
        table, kv_len = rest
        return run(
            query,
            pages,
            table + number % copies * used,
            kv_len,
            scale=case.scale,
            soft_cap=case.soft_cap,
            window=case.window,
            ancestor_mask=None,
        )

    return Work(
        operation="paged_attention",
        case=case,
        run=paged_attention,
        call=call,
        follow=lambda query, result: result,
        carry=query,
        turns=((pages, table, kv_len),),
        num_bytes=int((end - first).sum()) * page_bytes + 2 * query.nbytes,
        error=_distance,
        tolerance=2e-2 if dtype.itemsize < 4 else 1e-4,
    )


def _page_range(case: attention_cases.Case, kv_len: Array) -> tuple[Array, Array]:
    """Return the first page that each sequence reads, and the last one plus 1."""
    end = -(-kv_len // case.page_size)
    if case.window is None:
        return jnp.zeros_like(end), end
    lowest = jnp.maximum(kv_len - case.queries - case.window + 1, 0)
    return jnp.minimum(lowest // case.page_size, end), end


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _attention_arrays(
    case: attention_cases.Case, dtype: jnp.dtype, copies: int, kv_len: Array
) -> tuple[Array, Array, Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    table_len = -(-case.context // case.page_size)
    used = case.seqs * table_len
    table = jax.random.permutation(keys[0], jnp.arange(used, dtype=jnp.int32))
    table = table.reshape(case.seqs, table_len)
    # Scale the scores to about 2, so that the softmax is neither flat nor one-hot.
    spread = 2 / (case.scale * case.head_dim**0.5)
    heads = (case.seqs, case.queries, case.q_heads, case.head_dim)
    query = jax.random.normal(keys[1], heads, jnp.float32) * spread

    position = jnp.arange(table_len * case.page_size, dtype=jnp.int32)[None]
    seen = position < kv_len[:, None]
    if case.window is not None:
        lowest = kv_len - case.queries - case.window + 1
        seen &= position >= lowest[:, None]
    is_seen = jnp.zeros((used, case.page_size), bool)
    is_seen = is_seen.at[table].set(seen.reshape(case.seqs, table_len, -1))
    is_seen = jnp.tile(is_seen, (copies, 1))[:, :, None, None]
    shape = (copies * used, case.page_size, 2 * case.kv_heads, case.head_dim)
    pages = jnp.where(is_seen, jax.random.normal(keys[2], shape, dtype), jnp.nan)
    # Page ids past the end of a sequence are invalid, so that using one gives a wrong
    # result.
    page = jnp.arange(table_len, dtype=jnp.int32)[None]
    is_used = page * case.page_size < kv_len[:, None]
    return query.astype(dtype), pages, jnp.where(is_used, table, copies * used)


def sampling(
    case: sampling_cases.Case,
    controls: str,
    dtype: DTypeLike,
    *,
    logit_bytes: int = LOGIT_BYTES,
) -> Work:
    """Make one device's share of a verification round; `controls` is in `CONTROLS`.

    The share is processed like a whole vocabulary: communication between devices is not
    part of the work.
    """
    columns = case.columns // case.shards
    temperature, top_p = CONTROLS[controls]
    logits, probs, *rest = _sampling_arrays(case, jnp.dtype(dtype))
    is_greedy = temperature == 0
    num_bytes = logits.nbytes
    if is_greedy or not case.drafts:
        probs = None
    else:
        num_bytes += case.seqs * columns * probs.dtype.itemsize  # of one row each

    # With fewer arrays, all would fit in a GPU's L2 cache, and a TPU's compiler would
    # copy an array into vector memory once for all calls.
    num_turns = min(max(1, -(-logit_bytes // logits.nbytes)), MAX_TURNS)
    every = [jnp.roll(logits, turn, axis=-1) for turn in range(num_turns)]

    def call(run: Any, carry: Any, number: Array, logits: Array, *rest: Any) -> Any:
        # The barrier keeps reads of the logits inside the loop. Without it XLA could
        # move them out, as they depend on nothing that changes in the loop.
        logits, (tokens, uniform) = jax.lax.optimization_barrier((logits, carry))
        probs, accept_uniform = rest
        full = functools.partial(jnp.full, (case.seqs,))
        return run(
            tokens,
            probs,
            logits,
            full(case.drafts, jnp.int32),
            SamplingValues(
                full(temperature, jnp.float32),
                full(0, jnp.int32),
                full(top_p, jnp.float32),
                full(0.0, jnp.float32),
            ),
            rule=full(STANDARD, jnp.int32),
            accept_uniform=accept_uniform,
            sample_uniform=uniform,
            noise_words=None,
            vocab_size=min(columns, case.vocab_size),
            axis_name=None,
        )

    def follow(carry: Any, verdict: Any) -> Any:
        tokens, uniform = carry  # a token is never negative, but no compiler knows
        is_never = verdict.next_token < 0
        return (
            jnp.where(is_never[:, None], 0, tokens),
            jnp.where(is_never, 0.0, uniform),
        )

    tokens, accept_uniform, uniform = rest
    return Work(
        operation="rejection_sampling",
        case=case,
        run=rejection_sampling,
        call=call,
        follow=follow,
        carry=(tokens, uniform),
        turns=tuple((one, probs, accept_uniform) for one in every),
        num_bytes=num_bytes,
        error=_num_different,
        tolerance=0.0,
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sampling_arrays(case: sampling_cases.Case, dtype: jnp.dtype) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), 5)
    shape = (case.seqs, case.drafts + 1, case.columns // case.shards)
    # Few tokens hold most of the probability, as in text.
    logits = 4 * jax.random.normal(keys[0], shape, jnp.float32)
    shift = jax.random.normal(keys[1], shape, jnp.float32)[:, :-1]
    proposed = logits[:, :-1] + shift
    tokens = jax.random.categorical(keys[2], proposed).astype(jnp.int32)
    uniform = jax.random.uniform(keys[3], (case.seqs, case.drafts), jnp.float32)
    last = jax.random.uniform(keys[4], (case.seqs,), jnp.float32)
    return logits.astype(dtype), jax.nn.softmax(proposed), tokens, uniform, last


def writing(case: writing_cases.Case, dtype: DTypeLike) -> Work:
    """Make a pool, rows, and distinct slots for them."""
    dtype = jnp.dtype(dtype)
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (case.tokens, case.kv_heads, case.head_dim)
    key = jax.random.normal(keys[0], shape, dtype)
    value = jax.random.normal(keys[1], shape, dtype)
    slots = jax.random.permutation(
        keys[2], jnp.arange(case.pages * case.page_size, dtype=jnp.int32)
    )
    pool = (case.pages, case.page_size, 2 * case.kv_heads, case.head_dim)
    return Work(
        operation="write_kv_pages",
        case=case,
        run=write_kv_pages,
        call=lambda run, pool, number, *arrays: run(pool, *arrays),
        follow=lambda pool, result: result,
        carry=jax.random.normal(keys[3], pool, dtype),
        turns=((key, value, slots[: case.tokens]),),
        num_bytes=2 * (key.nbytes + value.nbytes),  # read, then written
        error=_num_different,
        tolerance=0.0,
    )


def _distance(left: Array, right: Array) -> float:
    """Return the largest difference; infinite if a value is NaN."""
    distance = jnp.abs(left.astype(jnp.float32) - right.astype(jnp.float32)).max()
    return float(jnp.where(jnp.isnan(distance), jnp.inf, distance))


def _num_different(left: Any, right: Any) -> float:
    """Return the number of sequences, or of values of a pool, that differ."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    differs = functools.reduce(jnp.logical_or, [one != two for one, two in pairs])
    return float(differs.sum())


def rivals_of(work: Work) -> dict[str, Rival]:
    """Return rivals by name: functions of (work, calls=, repeats=) that time one."""
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


def _heads(work: Work) -> tuple[Array, Array, Array]:
    """Return query, keys and values as `[seq, token, head, head_dim]`."""
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
        raise NotImplementedError("supports only one query per sequence")
    if case.window is not None:
        raise NotImplementedError("supports no sliding window")
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
        # The library's default of 8 needs more shared memory than an H200 has, at
        # head_dim 256.
        given = {"pages_per_compute_block": 4}
    else:
        raise NotImplementedError("runs only on TPU and GPU")

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
        raise NotImplementedError("runs only on GPU")

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
        # The shift is always 0. It is added so that no compiler starts reading before
        # the previous call has ended.
        best = (logits.astype(jnp.float32) + shift).max(axis=(0, 1, 2))
        return jnp.where(best > 1e30, 1.0, 0.0).astype(jnp.float32)

    turns = [arrays[:1] for arrays in work.turns]
    return measure(step, jnp.float32(0), turns, **timing)


def _categorical(work: Work, **timing: Any) -> Spread:
    def step(carry: Array, number: Array, logits: Array) -> Array:
        # Compute every row, as any sampler must that does not know in advance which row
        # it needs.
        probs = jax.nn.softmax(logits.astype(jnp.float32) + carry.min(), axis=-1)
        key = jax.random.key(number)
        tokens = jax.random.categorical(key, jnp.log(probs))
        return jnp.where(tokens < 0, 1.0, 0.0).astype(jnp.float32)

    turns = [arrays[:1] for arrays in work.turns]
    rows = jnp.zeros(turns[0][0].shape[:2], jnp.float32)
    return measure(step, rows, turns, **timing)
