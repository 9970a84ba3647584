"""Random rounds of rejection sampling, and their verdicts by loops in float64.

Each rule is written as its paper states it, for one sequence with whole rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxspec.program import randomness
from jaxspec.program.randomness import ACCEPT, SAMPLE
from jaxspec.program.rows import Active
from jaxspec_kernels.rejection_sampling import (
    BLOCK,
    COUPLED,
    STANDARD,
    SamplingValues,
    noise,
    reference,
)
from tests.kernels.oracle import UNOPTIMISED
from tests.support.distributions import filtered_distribution
from tests.support.rows import make_active

START = 20  # known tokens of every sequence
GREEDY = -1
KINDS = GREEDY, STANDARD, BLOCK, COUPLED
COLUMNS = 50
TILE = 16  # four tiles, of which the last overlaps the third
RULES = {"standard": STANDARD, "block": BLOCK, "coupled": COUPLED, "greedy": GREEDY}


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
    num_valid_drafts: np.ndarray
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
            jnp.asarray(self.num_valid_drafts, jnp.int32),
            self.sampling_values,
        )

    @property
    def numbers(self) -> dict[str, jax.Array]:
        """The keyword arguments: rules, and random numbers from the engine's keys."""
        rule = jnp.asarray(np.maximum(self.kind, 0), jnp.int32)
        random = random_numbers(jnp.asarray(self.seed), self.tokens.shape[1])
        return dict(rule=rule, **random)

    def active(self, **fields: Any) -> Active:
        """Return the sequences as a step program has them."""
        return make_active(
            len(self.kind),
            num_tokens=START,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            rule=np.maximum(self.kind, 0),
            seed=self.seed,
            **fields,
        )

    def target(self, seq: int) -> np.ndarray:
        """Return a sequence's filtered distributions, `[draft+1, vocab]`.

        They are 0 in rows without a finite logit.
        """
        logits = np.where(np.isnan(self.logits[seq]), -np.inf, self.logits[seq])
        is_finite = logits.max(axis=-1, keepdims=True) > -np.inf
        controls: Any = self.temperature[seq], self.top_k[seq], self.top_p[seq]
        found = filtered_distribution(
            np.where(is_finite, logits, 0), *controls, min_p=self.min_p[seq]
        )
        return np.where(is_finite, found, 0)


@partial(jax.jit, static_argnums=1, compiler_options=UNOPTIMISED)
def random_numbers(seed: jax.Array, drafts: int) -> dict[str, jax.Array]:
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
    is_filtered: bool = True,
    kinds: Sequence[int] = KINDS,
) -> Round:
    """Return a random mixed batch in which every number of accepted drafts occurs."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(seqs, drafts + 1, vocab)).astype(np.float32) * 2
    nearby = logits[:, :-1] + random.normal(size=(seqs, drafts, vocab)) * 0.5
    kind = random.permutation(np.resize(kinds, seqs))
    hot = random.choice([0.7, 1.0, 1.3], seqs)
    top_k = random.choice([0, 3, 17], seqs) * is_filtered
    top_p = np.where(is_filtered, random.choice([1.0, 0.8, 0.3], seqs), 1.0)
    min_p = random.choice([0.0, 0.0, 0.1], seqs) * is_filtered
    keys = random.integers(0, 2**32, (seqs, 2), dtype=np.uint32)
    words = random_numbers(jnp.asarray(keys), drafts)["noise_words"]
    shared = noise_of(words, vocab)
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
            own = target / shared[seq, i] if kind[seq] == COUPLED else target
            tokens[seq, i] = own.argmax()
    return Round(
        kind=kind,
        tokens=tokens,
        draft=draft,
        logits=logits,
        num_valid_drafts=np.minimum(random.integers(0, drafts + 3, seqs), drafts),
        temperature=np.where(kind == GREEDY, 0.0, hot).astype(np.float32),
        top_k=top_k,
        top_p=top_p.astype(np.float32),
        min_p=min_p.astype(np.float32),
        seed=keys,
    )


@partial(jax.jit, static_argnums=1, compiler_options=UNOPTIMISED)
def _noise_of(words: jax.Array, size: int) -> jax.Array:
    ids = jnp.arange(size, dtype=jnp.uint32).reshape((1,) * (words.ndim - 1) + (size,))
    return noise.exponential(words[..., :1], words[..., 1:], ids)


def noise_of(words: Any, size: int) -> np.ndarray:
    """Return the noise of the coupled rule, `[*batch, size]`, from its words."""
    return np.asarray(_noise_of(jnp.asarray(words), size), np.float64)


def coupled_noise(seed: Any, position: Any, size: int) -> np.ndarray:
    """Return the noise of the coupled rule, `[*batch, size]`, at positions."""
    place = jnp.asarray(position, jnp.int32)
    role = jnp.full_like(place, SAMPLE)
    return noise_of(randomness.words(jnp.asarray(seed), place, role), size)


def invert(weights: np.ndarray, uniform: float) -> int:
    """Return the token at `uniform` of the cumulative weights, which may sum to 0."""
    is_past = np.cumsum(weights) > uniform * weights.sum()
    return int((is_past & (weights > 0)).argmax())


def accept_choices(drafts: np.ndarray, choices: np.ndarray) -> tuple[int, int]:
    """Accept drafts while they equal `choices`, the tokens of plain decoding."""
    is_equal = np.append(drafts == choices[: len(drafts)], False)
    accepted = int(is_equal.argmin())
    return accepted, int(choices[accepted])


def verify_standard(
    drafts: np.ndarray, draft: np.ndarray, target: np.ndarray, uniform: np.ndarray
) -> tuple[int, float]:
    """Return the accepted drafts, and the target's factor in the residual.

    References: Leviathan et al. 2023, arXiv:2211.17192, Alg. 1.
    """
    for index, token in enumerate(drafts):
        if not uniform[index] * draft[index, token] < target[index, token]:
            return index, 1.0
    return len(drafts), 1.0


def verify_block(
    drafts: np.ndarray, draft: np.ndarray, target: np.ndarray, uniform: np.ndarray
) -> tuple[int, float]:
    """Return the accepted drafts, and the target's factor in the residual.

    References: Sun et al. 2024, arXiv:2403.10444, Alg. 2.
    """
    joint, accepted, scale = 1.0, 0, 1.0
    for index, token in enumerate(drafts):
        probability = draft[index, token] or 1.0  # 0: the token was not drawn from it
        joint = min(1.0, joint * target[index, token] / probability)
        accept = joint
        if index + 1 < len(drafts):
            more = np.maximum(joint * target[index + 1] - draft[index + 1], 0).sum()
            room = more + 1 - joint
            accept = more / room if room > 0 else 1.0
        if uniform[index] < accept:
            accepted, scale = index + 1, joint
    return accepted, scale


def by_loops(one: Round) -> tuple[np.ndarray, np.ndarray]:
    """Return the verdict of each sequence alone: accepted drafts and next tokens."""
    numbers = {name: np.asarray(value) for name, value in one.numbers.items()}
    noise = noise_of(numbers["noise_words"], one.logits.shape[-1])
    verdicts = []
    for seq, kind in enumerate(one.kind):
        target = one.target(seq)
        drafts = one.tokens[seq, : one.num_valid_drafts[seq]]
        if kind in (GREEDY, COUPLED):
            scores = target / noise[seq] if kind == COUPLED else target
            verdicts.append(accept_choices(drafts, scores.argmax(axis=1)))
            continue
        draft = one.draft[seq].astype(np.float64)
        verify = verify_block if kind == BLOCK else verify_standard
        count, scale = verify(drafts, draft, target, numbers["accept_uniform"][seq])
        weights = target[count]
        if count < len(drafts):
            residual = np.maximum(scale * weights - draft[count], 0)
            weights = residual if residual.any() else weights
        verdicts.append((count, invert(weights, numbers["sample_uniform"][seq])))
    accepted, token = np.transpose(verdicts)
    return accepted, token


def forced_counts(one: Round, seed: int = 0) -> np.ndarray:
    """Return a random number of drafts to accept per sequence."""
    return (
        np.random.default_rng(seed)
        .integers(0, one.num_valid_drafts + 1)
        .astype(np.int32)
    )


def by_force(one: Round, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the verdict for forced counts, with the target's own token."""
    sample = np.asarray(one.numbers["sample_uniform"])
    noise = coupled_noise(one.seed, START + counts, one.logits.shape[-1])
    tokens = []
    for seq, count in enumerate(counts):
        distribution = one.target(seq)[count]
        if one.kind[seq] in (GREEDY, COUPLED):
            is_coupled = one.kind[seq] == COUPLED
            scores = distribution / noise[seq] if is_coupled else distribution
            tokens.append(scores.argmax())
        else:
            tokens.append(invert(distribution, sample[seq]))
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


def verdict_of(
    decide: Callable[..., Any],
    logits: Any,
    drafts: Sequence[int] = (0,),
    *,
    rule: int = STANDARD,
    u: float = 0.0,
    v: float = 0.0,
    draft: Sequence[float] | None = None,
    **more: Any,
) -> tuple[int, int]:
    """Return the verdict of one sequence, whose rows are all equal.

    Args:
        u: Uniform of every draft's acceptance.
        v: Uniform of the next token.
        more: Sampling values, and further arguments of `decide`.
    """
    width, vocab = len(drafts) + 1, len(logits)
    kept = dict(temperature=0.0 if rule == GREEDY else 1.0)
    kept |= {name: more.pop(name) for name in SamplingValues._fields if name in more}
    probs = None
    if draft is not None:
        row = jnp.asarray(draft, jnp.float32)
        probs = jnp.broadcast_to(row, (1, width - 1, vocab))
    found = decide(
        jnp.asarray([drafts], jnp.int32),
        probs,
        jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (1, width, vocab)),
        jnp.asarray([width - 1], jnp.int32),
        plain_sampling_values(1, **kept),
        rule=jnp.asarray([max(rule, 0)], jnp.int32),
        accept_uniform=jnp.full((1, width - 1), u, jnp.float32),
        sample_uniform=jnp.full(1, v, jnp.float32),
        noise_words=jnp.ones((1, width, 2), jnp.uint32),
        **more,
    )
    return int(found.num_accepted[0]), int(found.next_token[0])
