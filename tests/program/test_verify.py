"""In a mixed batch, every sequence's verdict equals that of a float64 loop."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.backend import Backend
from jaxspec.program import randomness
from jaxspec.program.plan import BLOCK, COUPLED, STANDARD
from jaxspec.program.propose import Proposal
from jaxspec.program.tree.tree import Tree
from jaxspec.program.verify import _group_size, force, verify
from tests.kernels import dense
from tests.kernels.oracle import UNOPTIMISED
from tests.support.distributions import check_counts, filtered_distribution
from tests.support.rows import make_active

SEQS, DRAFTS, VOCAB, START = 240, 3, 16, 20
STOP = 2
GREEDY = -1


def make_batch(kinds: np.ndarray) -> dict:
    """Return a batch with drafts so close to the target that any number is accepted."""
    random = np.random.default_rng(4)
    logits = random.normal(size=(SEQS, DRAFTS + 1, VOCAB)).astype(np.float32) * 2
    draft_logits = logits[:, :-1] + random.normal(size=(SEQS, DRAFTS, VOCAB)) * 0.7
    temperature = np.where(kinds == GREEDY, 0.0, random.choice([0.7, 1.0], SEQS))
    top_k = random.choice([0, 4, 9], SEQS)
    top_p = random.choice([1.0, 0.8], SEQS)
    # In some sequences, the first two positions may not hold the stop id.
    min_total = np.where(random.random(SEQS) < 0.5, START + 2, 0)
    active = make_active(
        SEQS,
        num_tokens=START,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_total=min_total,
        stop_ids=[[STOP]] * SEQS,
        rule=np.maximum(kinds, 0),
    )
    masked = logits.copy()
    masked_draft = draft_logits.copy()
    for offset in range(2):
        masked[min_total > START, offset, STOP] = -np.inf
        masked_draft[min_total > START, offset, STOP] = -np.inf
    target = np.empty(logits.shape)
    draft = np.empty(draft_logits.shape)
    tokens = np.empty((SEQS, DRAFTS), int)
    for row, offset in np.ndindex(SEQS, DRAFTS + 1):
        controls: Any = temperature[row], top_k[row], np.float32(top_p[row])
        target[row, offset] = filtered_distribution(masked[row, offset], *controls)
        if offset < DRAFTS:
            distribution = filtered_distribution(masked_draft[row, offset], *controls)
            draft[row, offset] = distribution
            if kinds[row] == GREEDY or random.random() < 0.3:
                distribution = target[row, offset]
            tokens[row, offset] = random.choice(VOCAB, p=distribution)
            if kinds[row] == GREEDY and random.random() < 0.7:
                tokens[row, offset] = masked[row, offset].argmax()
    # Give every draft token a positive draft probability.
    drawn = np.take_along_axis(draft, tokens[..., None], 2)
    np.put_along_axis(draft, tokens[..., None], np.maximum(drawn, 0.01), 2)
    draft /= draft.sum(axis=2, keepdims=True)
    return dict(
        active=active,
        logits=logits,
        masked=masked,
        target=target,
        draft=draft.astype(np.float32),
        tokens=tokens,
        num_draft_tokens=random.integers(0, DRAFTS + 1, SEQS),
    )


def run_accept(batch: dict, **forced: Any) -> tuple[np.ndarray, np.ndarray]:
    tokens = jnp.asarray(batch["tokens"], jnp.int32)
    num_draft_tokens = jnp.asarray(batch["num_draft_tokens"], jnp.int32)
    decide = partial(verify, tree=Tree.chain(DRAFTS), adjust=None, **forced)
    # Jit a new function: a cached trace would not contain a mutant.
    run = jax.jit(lambda *args: decide(*args, Backend()), compiler_options=UNOPTIMISED)
    verdict = run(
        Proposal(tokens, num_draft_tokens, jnp.asarray(batch["draft"])),
        jnp.asarray(batch["logits"].reshape(-1, VOCAB)),
        num_draft_tokens,
        batch["active"],
    )
    return np.asarray(verdict.num_accepted), np.asarray(verdict.next_token)


def numbers_of(active) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return accept uniforms, sample uniforms and coupled noise by documented keys."""
    numbers = jax.jit(_numbers, compiler_options=UNOPTIMISED)(active.seed)
    uniform, sample, noise = map(np.asarray, numbers)
    return uniform, sample, noise


def _numbers(seed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    shape = SEQS, DRAFTS
    uniform = randomness.uniform(
        jnp.broadcast_to(seed[:, None], (*shape, 2)),
        jnp.full(shape, START, jnp.int32),
        randomness.ACCEPT,
        jnp.broadcast_to(jnp.arange(DRAFTS, dtype=jnp.int32)[None], shape),
    )
    sample = randomness.uniform(
        seed, jnp.full(SEQS, START, jnp.int32), randomness.SAMPLE
    )
    noise = dense.exponential(
        jnp.broadcast_to(seed[:, None], (SEQS, DRAFTS + 1, 2)),
        START + jnp.broadcast_to(jnp.arange(DRAFTS + 1)[None], (SEQS, DRAFTS + 1)),
        randomness.SAMPLE,
        VOCAB,
    )
    return uniform, sample, noise


def invert(weights: np.ndarray, uniform: float) -> int:
    total = np.cumsum(weights / weights.sum())
    return int(np.searchsorted(total, uniform, side="right"))


def by_choices(drafts: np.ndarray, choices: np.ndarray) -> tuple[int, int]:
    """Return accepted drafts and the next token.

    `choices` are the tokens of plain decoding.
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == choices[accepted]:
        accepted += 1
    return accepted, int(choices[accepted])


def by_standard(drafts, draft, target, uniform, sample) -> tuple[int, int]:
    for index, token in enumerate(drafts):
        if not uniform[index] * draft[index, token] < target[index, token]:
            residual = np.maximum(target[index] - draft[index], 0)
            return index, invert(residual, sample)
    return len(drafts), invert(target[len(drafts)], sample)


def by_block(drafts, draft, target, uniform, sample) -> tuple[int, int]:
    count, joint, accepted, scale = len(drafts), 1.0, 0, 1.0
    for index, token in enumerate(drafts):
        joint = min(1.0, joint * target[index, token] / draft[index, token])
        accept = joint
        if index + 1 < count:
            more = np.maximum(joint * target[index + 1] - draft[index + 1], 0).sum()
            room = more + 1 - joint
            accept = more / room if room > 0 else 1.0
        if uniform[index] < accept:
            accepted, scale = index + 1, joint
    if accepted == count:
        return accepted, invert(target[count], sample)
    residual = np.maximum(scale * target[accepted] - draft[accepted], 0)
    return accepted, invert(residual, sample)


def expected_of(batch: dict, kinds: np.ndarray) -> list[tuple[int, int]]:
    uniform, sample, noise = numbers_of(batch["active"])
    verdicts = []
    for row, kind in enumerate(kinds):
        drafts = batch["tokens"][row, : batch["num_draft_tokens"][row]]
        target = batch["target"][row]
        rest = batch["draft"][row].astype(np.float64), target, uniform[row], sample[row]
        if kind == GREEDY:
            choices = batch["masked"][row].argmax(axis=1)
            verdicts.append(by_choices(drafts, choices))
        elif kind == COUPLED:
            choices = (target / noise[row]).argmax(axis=1)
            verdicts.append(by_choices(drafts, choices))
        elif kind == BLOCK:
            verdicts.append(by_block(drafts, *rest))
        else:
            verdicts.append(by_standard(drafts, *rest))
    return verdicts


def check_mixed_batch(kinds_in_batch: tuple[int, ...]) -> None:
    """Check the verdict of every sequence of a batch with these kinds."""
    kinds = np.resize(kinds_in_batch, SEQS)
    batch = make_batch(kinds)
    accepted, following = run_accept(batch)
    expected = np.array(expected_of(batch, kinds))
    np.testing.assert_array_equal(accepted, expected[:, 0])
    np.testing.assert_array_equal(following, expected[:, 1])
    assert set(expected[:, 0]) == set(range(DRAFTS + 1))


def test_all_rules_in_one_batch():
    check_mixed_batch((STANDARD, COUPLED, GREEDY, BLOCK))


def test_greedy_batch():
    check_mixed_batch((GREEDY,))


def test_standard_with_greedy():
    """Without coupled and block sequences, the program skips the branches for them."""
    check_mixed_batch((STANDARD, GREEDY))


def test_coupled_batch():
    check_mixed_batch((COUPLED,))


def test_groups_decide_like_the_whole_batch(monkeypatch):
    """Hundreds of sequences exceed the memory of one group."""
    most = 4 * VOCAB * (DRAFTS + 1) * 32
    monkeypatch.setattr("jaxspec.program.verify.MAX_GROUP_BYTES", most)
    assert _group_size((SEQS, DRAFTS + 1, VOCAB)) == 30
    check_mixed_batch((STANDARD, COUPLED, GREEDY, BLOCK))


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((8, 6, 256_000), 8),
        ((256, 6, 256_000), 32),
        ((256, 1, 256_000), 256),
        ((256, 6, 32_000), 256),  # each of eight shards of the vocabulary
        ((1, 6, 256_000), 1),
    ],
)
def test_group_size_is_bounded_by_logits(shape, size):
    assert _group_size(shape) == size


# There are more rates than drafts, as in a launch with fewer drafts than the engine's
# maximum.
RATES = (0.9, 0.6, 0.75, 0.1)


def forced_of(batch: dict, kinds: np.ndarray) -> list[tuple[int, int]]:
    """Return numbers of accepted drafts and next tokens by the specification.

    A draft passes if its uniform is below its rate. The next token is the target's
    argmax or sample.
    """
    uniform, sample, noise = numbers_of(batch["active"])
    verdicts = []
    for row, kind in enumerate(kinds):
        count = 0
        while count < batch["num_draft_tokens"][row]:
            if not uniform[row, count] < np.float32(RATES[count]):
                break
            count += 1
        distribution = batch["target"][row, count]
        if kind == GREEDY:
            token = batch["masked"][row, count].argmax()
        elif kind == COUPLED:
            token = (distribution / noise[row, count]).argmax()
        else:
            token = invert(distribution, sample[row])
        verdicts.append((count, int(token)))
    return verdicts


def test_forced_acceptance_ignores_the_models():
    kinds = np.resize((STANDARD, COUPLED, GREEDY), SEQS)
    batch = make_batch(kinds)
    rates = jnp.array(RATES, jnp.float32)
    found = run_accept(batch, forced_acceptance=rates)
    np.testing.assert_array_equal(np.transpose(found), forced_of(batch, kinds))
    judged = [count for count, _ in expected_of(batch, kinds)]
    assert (found[0] != judged).mean() > 0.3


def test_forced_counts_follow_the_probabilities():
    seqs = 40_000
    seeds = np.random.default_rng(3).integers(0, 2**32, (seqs, 2), dtype=np.uint32)
    active = make_active(seqs, seed=seeds)
    for count, distribution in (
        (3, [0.1, 0.9 * 0.4, 0.54 * 0.25, 0.54 * 0.75]),
        (1, [0.1, 0.9, 0, 0]),
    ):
        num_draft_tokens = jnp.full(seqs, count, jnp.int32)
        found = force(jnp.array(RATES[:3], jnp.float32), num_draft_tokens, active)
        counts = np.bincount(np.asarray(found), minlength=4)
        check_counts(counts, np.array(distribution))
    sure = jnp.array([1.0, 1.0, 0.0], jnp.float32)
    found = force(sure, jnp.full(seqs, 3, jnp.int32), active)
    assert set(np.asarray(found)) == {2}
