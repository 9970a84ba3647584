"""Random rounds of rejection sampling, and their verdicts computed on whole rows."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxspec.program import randomness
from jaxspec.program.propose import Proposal
from jaxspec.program.randomness import ACCEPT, SAMPLE
from jaxspec_kernels.rejection_sampling import (
    BLOCK,
    COUPLED,
    STANDARD,
    SamplingValues,
    reference,
)
from tests.kernels import dense, whole_rows
from tests.kernels.oracle import UNOPTIMISED
from tests.support.distributions import filtered_distribution
from tests.support.rows import make_active

START = 20  # known tokens of every sequence
GREEDY = -1
KINDS = GREEDY, STANDARD, BLOCK, COUPLED
COLUMNS = 50
TILE = 16  # four tiles, of which the last overlaps the third
RULES = {"standard": STANDARD, "block": BLOCK, "coupled": COUPLED, "greedy": GREEDY}


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Compile without jax's persistent cache."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 1e9)
    yield
    jax.config.update(name, before)


def sliced(
    run: Callable[..., Any],
    shape: tuple[int, ...] = (2,),
    *,
    vocab_size: int = 2**30,
    has_probs: bool = True,
    check_vma: bool = True,
) -> Any:
    """Split the vocabulary of an implementation over all axes of a mesh.

    Args:
        check_vma: Whether jax checks that the verdict is the same on every device.

    Returns:
        A jitted function of the arrays and, last, the numbers of a round.
    """
    names = ("replica", "model")[-len(shape) :]
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    split = P(None, None, names)
    decide = partial(run, vocab_size=vocab_size, axis_name=names)
    return jax.jit(
        jax.shard_map(
            lambda *arrays: decide(*arrays[:-1], **arrays[-1]),
            mesh=Mesh(devices, names),
            in_specs=(P(), split if has_probs else P(), split, P(), P(), P()),
            out_specs=P(),
            check_vma=check_vma,
        ),
        compiler_options=UNOPTIMISED,
    )


@dataclass(frozen=True, kw_only=True)
class Round:
    """Arguments of one call of rejection sampling."""

    kind: np.ndarray  # of KINDS
    tokens: np.ndarray
    draft: np.ndarray  # [seq, draft, vocab], probabilities
    logits: np.ndarray  # [seq, draft+1, vocab]
    num_draft_tokens: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray

    @property
    def sampling_values(self) -> SamplingValues:
        """The sampling parameters of each sequence."""
        return SamplingValues(
            jnp.asarray(self.temperature, jnp.float32),
            jnp.asarray(self.top_k, jnp.int32),
            jnp.asarray(self.top_p, jnp.float32),
            jnp.asarray(self.min_p, jnp.float32),
        )

    @property
    def arrays(self) -> tuple:
        """The positional arguments of `rejection_sampling`."""
        return (
            jnp.asarray(self.tokens, jnp.int32),
            jnp.asarray(self.draft, jnp.float32),
            jnp.asarray(self.logits),
            jnp.asarray(self.num_draft_tokens, jnp.int32),
            self.sampling_values,
        )

    @property
    def numbers(self) -> dict[str, jax.Array]:
        """The keyword arguments: rules, and random numbers from the engine's keys."""
        rule = jnp.asarray(np.maximum(self.kind, 0), jnp.int32)
        random = _random_numbers(jnp.asarray(self.seed), self.tokens.shape[1])
        return dict(rule=rule, **random)


@partial(jax.jit, static_argnums=1, compiler_options=UNOPTIMISED)
def _random_numbers(seed: jax.Array, drafts: int) -> dict[str, jax.Array]:
    seqs = len(seed)
    each = jnp.broadcast_to(seed[:, None], (seqs, drafts + 1, 2))
    index = jnp.arange(drafts + 1, dtype=jnp.int32)[None]
    index = jnp.broadcast_to(index, (seqs, drafts + 1))
    start = jnp.full_like(index, START)
    words = randomness.words(each, START + index, jnp.full_like(index, SAMPLE))
    return dict(
        accept_uniform=randomness.uniform(each, start, ACCEPT, index)[:, :-1],
        sample_uniform=randomness.uniform(seed, start[:, 0], SAMPLE),
        noise_words=words,
    )


def make_round(
    seqs: int = 64,
    drafts: int = 3,
    vocab: int = 50,
    *,
    seed: int = 0,
    spread: float = 2.0,
    is_filtered: bool = True,
) -> Round:
    """Return a random mixed batch in which every number of accepted drafts occurs."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(seqs, drafts + 1, vocab)).astype(np.float32) * spread
    nearby = logits[:, :-1] + random.normal(size=(seqs, drafts, vocab)) * 0.5
    kind = random.permutation(np.resize(KINDS, seqs))
    hot = random.choice([0.7, 1.0, 1.3], seqs)
    top_k = random.choice([0, 3, 17], seqs) * is_filtered
    top_p = np.where(is_filtered, random.choice([1.0, 0.8, 0.3], seqs), 1.0)
    min_p = random.choice([0.0, 0.0, 0.1], seqs) * is_filtered
    keys = random.integers(0, 2**32, (seqs, 2), dtype=np.uint32)
    noise = np.asarray(_noise(jnp.asarray(keys), drafts, vocab))
    draft = np.empty((seqs, drafts, vocab), np.float32)
    tokens = np.empty((seqs, drafts), int)
    for seq, i in np.ndindex(seqs, drafts):
        kept: Any = hot[seq], top_k[seq], top_p[seq]
        draft[seq, i] = filtered_distribution(nearby[seq, i], *kept)
        # Half of the drafts are drawn from the target, if the draft can propose them.
        distribution = draft[seq, i].astype(np.float64)
        if random.random() < 0.5:
            distribution = distribution * np.exp(logits[seq, i])
        tokens[seq, i] = random.choice(vocab, p=distribution / distribution.sum())
        if kind[seq] in (GREEDY, COUPLED) and random.random() < 0.7:
            target = filtered_distribution(logits[seq, i], *kept)
            own = target / noise[seq, i] if kind[seq] == COUPLED else target
            tokens[seq, i] = own.argmax()
    return Round(
        kind=kind,
        tokens=tokens,
        draft=draft,
        logits=logits,
        num_draft_tokens=np.minimum(random.integers(0, drafts + 3, seqs), drafts),
        temperature=np.where(kind == GREEDY, 0.0, hot).astype(np.float32),
        top_k=top_k,
        top_p=top_p.astype(np.float32),
        min_p=min_p.astype(np.float32),
        seed=keys,
    )


@partial(jax.jit, static_argnums=(1, 2), compiler_options=UNOPTIMISED)
def _noise(keys: jax.Array, drafts: int, vocab: int) -> jax.Array:
    """Return the noise that coupled drafts share with the target."""
    position = START + jnp.arange(drafts, dtype=jnp.int32)[None]
    position = jnp.broadcast_to(position, (len(keys), drafts))
    each = jnp.broadcast_to(keys[:, None], (len(keys), drafts, 2))
    return dense.exponential(each, position, SAMPLE, vocab)


_decide = jax.jit(whole_rows.decide, compiler_options=UNOPTIMISED)


def by_whole_rows(one: Round) -> tuple[np.ndarray, np.ndarray]:
    """Return the verdict of the rules on whole rows, from the same logits and seeds."""
    seqs, drafts = one.tokens.shape
    active = make_active(
        seqs,
        num_tokens=START,
        temperature=one.temperature,
        top_k=one.top_k,
        top_p=one.top_p,
        min_p=one.min_p,
        rule=np.maximum(one.kind, 0),
        seed=one.seed,
    )
    tokens, draft, logits, num_draft_tokens, _ = one.arrays
    proposal = Proposal(tokens, num_draft_tokens, draft)
    flat = logits.astype(jnp.float32).reshape(seqs * (drafts + 1), -1)
    verdict = _decide(proposal, flat, num_draft_tokens, active)
    return np.asarray(verdict.num_accepted), np.asarray(verdict.next_token)


def forced_counts(one: Round, seed: int = 0) -> np.ndarray:
    """Return a random number of drafts to accept per sequence."""
    return (
        np.random.default_rng(seed)
        .integers(0, one.num_draft_tokens + 1)
        .astype(np.int32)
    )


def by_force(one: Round, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the verdict for forced counts: the target's own token, in float64."""
    sample = np.asarray(one.numbers["sample_uniform"])
    position = jnp.asarray(START + counts, jnp.int32)
    seed, vocab = jnp.asarray(one.seed), one.logits.shape[-1]
    noise = np.asarray(dense.exponential(seed, position, SAMPLE, vocab))
    tokens = []
    for seq, count in enumerate(counts):
        row = one.logits[seq, count]
        kept: Any = one.temperature[seq], one.top_k[seq], one.top_p[seq]
        distribution = filtered_distribution(row, *kept, min_p=one.min_p[seq])
        if one.kind[seq] == GREEDY:
            tokens.append(row.argmax())
        elif one.kind[seq] == COUPLED:
            tokens.append((distribution / noise[seq]).argmax())
        else:
            is_past = (distribution > 0) & (np.cumsum(distribution) > sample[seq])
            tokens.append(is_past.argmax())
    return counts, np.array(tokens)


def with_kind(one: Round, kind: int) -> Round:
    """Return the same round with one rule for all sequences."""
    temperature = np.maximum(one.temperature, np.float32(0.7)) * (kind != GREEDY)
    return replace(one, kind=np.full_like(one.kind, kind), temperature=temperature)


@cache
def tiled(tile: int = TILE, vocab_size: int = COLUMNS) -> Any:
    """Return the jitted reference with tiles of `tile` columns."""
    return jax.jit(
        partial(
            reference.rejection_sampling,
            vocab_size=vocab_size,
            axis_name=None,
            tile=tile,
        ),
        compiler_options=UNOPTIMISED,
    )


def run(one: Round, tile: int = TILE, **changes) -> tuple[np.ndarray, np.ndarray]:
    """Return the verdict of the reference: accepted drafts and next tokens."""
    verdict = tiled(tile)(*one.arrays, **one.numbers | changes)
    return np.asarray(verdict.num_accepted), np.asarray(verdict.next_token)


def plain_sampling_values(seqs: int, **values) -> SamplingValues:
    """Return the same sampling values for all sequences."""
    given = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) | values
    return SamplingValues(
        jnp.full(seqs, given["temperature"], jnp.float32),
        jnp.full(seqs, given["top_k"], jnp.int32),
        jnp.full(seqs, given["top_p"], jnp.float32),
        jnp.full(seqs, given["min_p"], jnp.float32),
    )
