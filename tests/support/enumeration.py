"""Compute the exact distribution of a verification round from all its outcomes.

A case is a pair of random distributions, target and draft, over a few tokens; the
probabilities of a token depend on all tokens before it. The real acceptance rule runs
on every draft path, with uniform numbers just below and just above each threshold of a
float64 oracle. The oracle gives the probability of each outcome, and the rule gives the
decisions: if a threshold of the rule is wrong by more than the margin, the distribution
changes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.kernels.oracle import UNOPTIMISED

VOCAB, DRAFTS = 4, 3
# All probabilities are multiples of this, so that they and their sums are exact in
# float32.
GRAIN = 2.0**-12
# Distance of the uniforms from a threshold: a few float32 roundings.
MARGIN = 2.0**-22
LARGEST_UNIFORM = 1 - 2.0**-24

KINDS = (
    "dense",
    "sparse",
    "equal",
    "disjoint",
    "one_hot_draft",
    "one_hot_target",
    "tied",
    "near",
    "mixed",
)

Tree = list[
    np.ndarray
]  # level l: [vocab^l, vocab], the distribution of token l by prefix


@dataclass(frozen=True, kw_only=True)
class Case:
    """Target and draft distributions for every prefix, and the number of drafts."""

    kind: str
    target: Tree
    draft: Tree
    num_valid_drafts: int


def make_cases(count: int = 72, seed: int = 0) -> list[Case]:
    """Return random cases of every kind; most have all drafts, some fewer or none."""
    random = np.random.default_rng(seed)
    cases = []
    for index in range(count):
        kind = KINDS[index % len(KINDS)]
        target, draft = [], []
        for level in range(DRAFTS + 1):
            pairs = [_pair(kind, random) for _ in range(VOCAB**level)]
            target.append(np.stack([pair[0] for pair in pairs]))
            draft.append(np.stack([pair[1] for pair in pairs]))
        num_valid_drafts = (3, 3, 2, 3, 1, 3, 0)[index % 7]
        cases.append(
            Case(
                kind=kind,
                target=target,
                draft=draft[:-1],
                num_valid_drafts=num_valid_drafts,
            )
        )
    return cases


def constant_case(
    target: list[float], draft: list[float], num_valid_drafts: int
) -> Case:
    """Return a case whose probabilities are the same after every prefix."""

    def tree(distribution: list[float], levels: int) -> Tree:
        return [np.tile(distribution, (VOCAB**level, 1)) for level in range(levels)]

    return Case(
        kind="constant",
        target=tree(target, DRAFTS + 1),
        draft=tree(draft, DRAFTS),
        num_valid_drafts=num_valid_drafts,
    )


def _pair(kind: str, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    if kind == "mixed":
        kind = str(random.choice(KINDS[:-1]))
    if kind == "disjoint":
        size = random.integers(1, VOCAB)
        support = random.permutation(VOCAB) < size
        return _distribution(random, support), _distribution(random, ~support)
    everything = np.ones(VOCAB, bool)
    if kind == "sparse":
        return _distribution(random, _some(random)), _distribution(
            random, _some(random)
        )
    target = _distribution(random, everything)
    if kind == "equal":
        return target, target
    if kind == "tied":
        return target, random.permutation(target)
    if kind == "near":
        draft = target.copy()
        order = np.argsort(target)
        draft[order[-1]] -= GRAIN
        draft[order[0]] += GRAIN
        return target, draft
    one_hot = np.eye(VOCAB)[random.integers(VOCAB)]
    if kind == "one_hot_draft":
        return target, one_hot
    if kind == "one_hot_target":
        return one_hot, target
    return target, _distribution(random, everything)


def _some(random: np.random.Generator) -> np.ndarray:
    support = random.random(VOCAB) < 0.6
    support[random.integers(VOCAB)] = True
    return support


def _distribution(random: np.random.Generator, support: np.ndarray) -> np.ndarray:
    """Return a random distribution in multiples of the grain, positive on a support."""
    size = int(support.sum())
    total = round(1 / GRAIN) - size
    parts = random.multinomial(total, random.dirichlet(np.full(size, 0.7))) + 1
    distribution = np.zeros(VOCAB)
    distribution[support] = parts * GRAIN
    return distribution


@dataclass(frozen=True, kw_only=True)
class Paths:
    """All draft paths of all cases, one entry per path."""

    case: np.ndarray
    weight: np.ndarray  # probability that the draft samples this path
    tokens: np.ndarray  # [path, draft]
    draft: np.ndarray  # [path, draft, vocab]
    target: np.ndarray  # [path, draft+1, vocab]
    num_valid_drafts: np.ndarray


def make_paths(cases: list[Case]) -> Paths:
    """Return the paths that drafts can take; unused entries are NaN or arbitrary."""
    parts = []
    for number, case in enumerate(cases):
        count = case.num_valid_drafts
        every = np.indices((VOCAB,) * DRAFTS).reshape(DRAFTS, -1).T
        tokens = every[(every[:, count:] == number % VOCAB).all(axis=1)]
        prefix = np.zeros(len(tokens), int)
        weight = np.ones(len(tokens))
        draft = np.full((len(tokens), DRAFTS, VOCAB), np.nan)
        target = np.full((len(tokens), DRAFTS + 1, VOCAB), np.nan)
        for level in range(count + 1):
            target[:, level] = case.target[level][prefix]
            if level < count:
                draft[:, level] = case.draft[level][prefix]
                chosen = tokens[:, level]
                weight *= draft[np.arange(len(tokens)), level, chosen]
                prefix = prefix * VOCAB + chosen
        keep = weight > 0
        numbers = np.full(len(tokens), number), np.full(len(tokens), count)
        rows = (numbers[0], weight, tokens, draft, target, numbers[1])
        parts.append([row[keep] for row in rows])
    names = ("case", "weight", "tokens", "draft", "target", "num_valid_drafts")
    return Paths(
        **{
            name: np.concatenate(columns)
            for name, columns in zip(names, zip(*parts, strict=True), strict=True)
        }
    )


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The oracle's thresholds of a rule, per path and draft.

    Attributes:
        accept: Draft i passes if its uniform is below this.
        margin: Distance from the threshold at which float32 must decide correctly.
        scale: Factor of the target's probabilities in the residual, by number of
            accepted drafts.
    """

    accept: np.ndarray
    margin: np.ndarray
    scale: np.ndarray
    is_prefix: bool  # whether the first rejected draft ends the run of accepted drafts


def ratios(paths: Paths) -> np.ndarray:
    """Return target / draft probability of each draft token; NaN for unused ones."""
    index = paths.tokens[:, :, None]
    target = np.take_along_axis(paths.target[:, :-1], index, 2)[:, :, 0]
    return target / np.take_along_axis(paths.draft, index, 2)[:, :, 0]


def standard_oracle(paths: Paths) -> Thresholds:
    """Return the thresholds of Leviathan et al.: min(1, target / draft)."""
    accept = np.minimum(1, ratios(paths))
    ones = np.ones((len(accept), DRAFTS + 1))
    return Thresholds(
        accept=accept,
        margin=np.full_like(accept, MARGIN),
        scale=ones,
        is_prefix=True,
    )


def block_oracle(paths: Paths) -> Thresholds:
    """Return the thresholds of the block rule by Sun et al., in float64."""
    ratio = ratios(paths)
    joint = np.ones((len(ratio), DRAFTS + 1))
    accept, margin = np.empty_like(ratio), np.full_like(ratio, MARGIN)
    for i in range(DRAFTS):
        joint[:, i + 1] = np.minimum(1, joint[:, i] * ratio[:, i])
        here = joint[:, i + 1]
        accept[:, i] = here
        if i + 1 < DRAFTS:
            more = here[:, None] * paths.target[:, i + 1] - paths.draft[:, i + 1]
            positive = np.maximum(more, 0).sum(axis=1)
            room = positive + 1 - here
            safe = np.where(room > 0, room, 1)
            inner = np.where(room > 0, positive / safe, 1.0)
            is_last = paths.num_valid_drafts == i + 1
            accept[:, i] = np.where(is_last, here, inner)
            margin[:, i] = np.where(is_last, MARGIN, MARGIN / safe)
    return Thresholds(accept=accept, margin=margin, scale=joint, is_prefix=False)


def _uniforms(accept: np.ndarray, margin: np.ndarray, passes: np.ndarray) -> np.ndarray:
    """Return uniforms a margin away from a threshold, that must pass or fail."""
    below = np.minimum(accept - margin, LARGEST_UNIFORM)
    below = np.where(below < 0, accept / 2, below)
    above = np.where(accept + margin >= 1, (1 + accept) / 2, accept + margin)
    return np.where(passes, below, np.where(accept <= 0, 0.0, above))


def outcomes(paths: Paths, oracle: Thresholds) -> dict[str, np.ndarray]:
    """Return inputs of the rule: path x pass/fail pattern x edge of a next token.

    Only rows with a positive weight are returned; the weights of a case sum to 1.
    """
    count, drafts = oracle.accept.shape
    patterns = np.indices((2,) * drafts).reshape(drafts, -1).T.astype(bool)
    counts = np.arange(drafts)[None] < paths.num_valid_drafts[:, None]
    accept = np.where(counts, oracle.accept, 0.5)[:, None]  # [path, pattern, draft]
    passes = np.broadcast_to(patterns, (count, *patterns.shape))
    each = np.where(passes, accept, 1 - accept)
    weight = paths.weight[:, None] * each.prod(axis=2)
    uniform = _uniforms(accept, oracle.margin[:, None], passes)

    passed = passes & counts[:, None]
    index = np.arange(1, drafts + 1)
    if oracle.is_prefix:
        accepted = np.cumprod(passed, axis=2).sum(axis=2)
    else:
        accepted = np.where(passed, index, 0).max(axis=2)
    path = np.arange(count)[:, None]
    target = paths.target[path, accepted]
    draft = paths.draft[path, np.minimum(accepted, drafts - 1)]
    scale = oracle.scale[path, accepted][..., None]
    is_rejected = (accepted < paths.num_valid_drafts[:, None])[..., None]
    residual = np.where(is_rejected, np.maximum(scale * target - draft, 0), target)
    total = residual.sum(axis=2, keepdims=True)
    assert (total[..., 0][weight > 1e-12] > 0).all()
    mass = residual / np.where(total > 0, total, 1)  # [path, pattern, token]

    end = np.cumsum(mass, axis=2)
    margin = 4 * MARGIN / np.where(total > 0, total, 1)
    margin = np.where(mass > 2 * margin, margin, mass / 2)
    edges = np.stack([end - mass + margin, end - margin], axis=-1)
    edges = np.clip(edges, 0, LARGEST_UNIFORM)
    weight = weight[..., None, None] * mass[..., None] / 2
    weight = np.broadcast_to(weight, edges.shape)
    row, pattern, token, edge = np.nonzero(weight > 0)
    return dict(
        path=row,
        weight=weight[row, pattern, token, edge],
        accept_uniform=uniform[row, pattern],
        sample_uniform=edges[row, pattern, token, edge],
    )


def run_rule(rule: Callable[..., Any], paths: Paths, rows: dict[str, np.ndarray]):
    """Run the real rule on all rows; return numbers of accepted drafts, and tokens."""
    path = rows["path"]

    def floats(values: np.ndarray) -> jax.Array:
        return jnp.asarray(values, jnp.float32)

    # Jit a new function, because a cached trace would not contain a mutant.
    decide = jax.jit(
        lambda *args, **uniforms: rule(*args, **uniforms), compiler_options=UNOPTIMISED
    )
    verdict = decide(
        jnp.asarray(paths.tokens[path], jnp.int32),
        floats(paths.draft[path]),
        floats(paths.target[path]),
        jnp.asarray(paths.num_valid_drafts[path], jnp.int32),
        accept_uniform=floats(rows["accept_uniform"]),
        sample_uniform=floats(rows["sample_uniform"]),
    )
    return np.asarray(verdict.num_accepted), np.asarray(verdict.next_token)


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """A case, the distribution of its tokens, and its mean number accepted."""

    case: Case
    tokens: np.ndarray  # [vocab^(drafts+1)]
    mean_accepted: float

    @property
    def distance(self) -> float:
        """Return the total variation distance to the target's distribution."""
        own = np.ones(1)
        for level in self.case.target:
            own = (own[:, None] * level).reshape(-1)
        return float(np.abs(own - self.tokens).sum() / 2)


def distributions(
    cases: list[Case],
    rule: Callable[..., Any],
    oracle: Callable[[Paths], Thresholds],
) -> list[Distribution]:
    """Return distributions of `DRAFTS + 1` tokens: a round, then target draws."""
    paths = make_paths(cases)
    rows = outcomes(paths, oracle(paths))
    accepted, following = run_rule(rule, paths, rows)
    path, weight = rows["path"], rows["weight"]
    case = paths.case[path]
    found = []
    for number, one in enumerate(cases):
        mine = case == number
        tokens = paths.tokens[path[mine]]
        distribution = np.zeros(1)
        for level in range(DRAFTS + 1):
            code = np.zeros(len(tokens), int)
            for i in range(level):
                code = code * VOCAB + tokens[:, i]
            ends = accepted[mine] == level
            code = (code * VOCAB + following[mine])[ends]
            distribution = (distribution[:, None] * one.target[level]).reshape(-1)
            np.add.at(distribution, code, weight[mine][ends])
        average = float((weight[mine] * accepted[mine]).sum())
        found.append(Distribution(case=one, tokens=distribution, mean_accepted=average))
    return found
