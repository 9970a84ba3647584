"""The exact distribution of a round over a tree, by running it on every outcome.

The rule meets the spine with the uniforms of `tests.support.enumeration`. What is
drawn on the way beside it meets evenly spaced ones, as many as the target's
probabilities are multiples of: each is as likely as any other, so that weights only
have to be summed.
What stands beside the spine is anything, siblings that are equal included.

Coupled and greedy sequences have no distribution to count: token by token they equal
plain decoding, which `test_verify.py` compares.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.token_tree import leaf_paths, parents_of
from jaxspec.models.backend import Backend
from jaxspec.program import randomness
from jaxspec.program import verify as verify_module
from jaxspec.program.plan import RULES
from jaxspec.program.propose import Proposal
from jaxspec.program.rows import Active
from jaxspec.program.sampling import Numbers
from jaxspec.program.tree.tree import Tree
from jaxspec.program.tree.verify import verify_tree
from tests.kernels.oracle import UNOPTIMISED
from tests.support import enumeration
from tests.support.enumeration import (
    DRAFTS,
    VOCAB,
    Case,
    block_oracle,
    make_paths,
    outcomes,
    standard_oracle,
)
from tests.support.rows import make_active
from tests.support.trees import every_tree

# Probabilities are multiples of one fourth, zeros among them.
PARTS = 4
START = 7
ORACLES = {"standard": standard_oracle, "block": block_oracle}
TREES = {
    "leaves": leaf_paths(3, 1),
    # After a leaf there are drafts, and after those.
    "side paths": ((0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0)),
}


def random_distributions(random: np.random.Generator, level: int) -> np.ndarray:
    """One for every prefix of so many tokens."""
    weights = random.dirichlet(np.full(VOCAB, 3.0), VOCAB**level)
    return random.multinomial(PARTS, weights) / PARTS


def make_case(seed: int, tree: Tree, num_levels: int) -> Case:
    """Distributions by prefix; every third draft is certain."""
    random = np.random.default_rng(seed)
    draft = [random_distributions(random, level) for level in range(DRAFTS)]
    if seed % 3 == 2:
        draft = [np.eye(VOCAB)[distribution.argmax(axis=1)] for distribution in draft]
    return Case(
        kind="tree",
        target=[random_distributions(random, level) for level in range(DRAFTS + 1)],
        draft=draft,
        num_draft=min(num_levels, tree.main_chain.num_nodes),
    )


def all_drafts(tree: Tree, spine: np.ndarray, seed: int) -> np.ndarray:
    """Tokens by node: what stands beside depends on the spine, and on nothing else."""
    count = tree.main_chain.num_nodes
    code = spine[:, :count] @ (VOCAB ** np.arange(count))
    random = np.random.default_rng(seed)
    beside = random.integers(0, VOCAB, (VOCAB**count, tree.num_nodes - count))
    return np.concatenate([spine[:, :count], beside[code]], axis=1)


def code_of(tokens: np.ndarray) -> np.ndarray:
    """The number of a prefix among those of its length."""
    return tokens @ (VOCAB ** np.arange(tokens.shape[1])[::-1])


def rows_of_target(tree: Tree, drafts: np.ndarray, case: Case) -> np.ndarray:
    """The target's distribution at every row of the tree."""
    found = np.empty((len(drafts), tree.num_rows, VOCAB))
    for row in range(tree.num_rows):
        depth = tree.depths[row]
        way = tree.paths[row][1 : depth + 1] - 1
        found[:, row] = case.target[depth][code_of(drafts[:, way])]
    return found


def planned(accept: jax.Array, sample: jax.Array) -> Any:
    """In place of `draw_numbers`: the uniforms of an outcome, by what they are for.

    Args:
        accept: By draft; of where the round starts alone.
        sample: By how far the position is from there.
    """

    def draw(active: Active, purposes: Any, first: Any, *, width: int) -> Numbers:
        seqs = sample.shape[0]
        offset = jnp.broadcast_to(active.num_tokens[:, None] - START, (seqs, 1))
        drawn = jnp.take_along_axis(sample, offset, axis=1)
        parts = [drawn]
        if width > 1:
            # An accepting uniform of any other position would be NaN.
            parts.insert(0, jnp.where(offset == 0, accept[:, : width - 1], jnp.nan))
        expected = [randomness.ACCEPT] * (width - 1) + [randomness.SAMPLE]
        is_known = purposes % randomness.NUM_ROLES == jnp.array([expected])
        uniform = jnp.where(is_known, jnp.concatenate(parts, axis=1), jnp.nan)
        return Numbers(uniform, jnp.zeros((seqs, width, 2), jnp.uint32))

    return draw


def distribution_of_round(
    tree: Tree, rule: str, seed: int, num_levels: int
) -> tuple[float, float]:
    """What comes of every outcome: total variation to the target's own distribution.

    Returns:
        That, and the chance of a draft from beside the spine.
    """
    case = make_case(seed, tree, num_levels)
    paths = make_paths([case])
    with pytest.MonkeyPatch.context() as patch:
        # Logarithms of probabilities are rounded, and so are the uniforms' thresholds.
        patch.setattr(enumeration, "MARGIN", 2.0**-18)
        rows = outcomes(paths, ORACLES[rule](paths))
    # At each place after the first all evenly spaced uniforms, in every combination.
    places = tree.num_levels
    grid = np.indices((PARTS,) * places).reshape(places, -1).T
    repeat = functools.partial(np.repeat, repeats=len(grid), axis=0)
    path, weight = repeat(rows["path"]), repeat(rows["weight"]) / len(grid)
    later = np.tile((grid + 0.5) / PARTS, (len(rows["path"]), 1))
    sample = np.concatenate([repeat(rows["sample_uniform"])[:, None], later], axis=1)
    drafts = all_drafts(tree, paths.tokens, seed)
    target = rows_of_target(tree, drafts, case)
    spine = tree.main_chain.num_nodes
    probs = np.nan_to_num(paths.draft[:, :spine])
    seqs = len(path)
    active = dataclasses.replace(
        make_active(seqs, num_tokens=START, temperature=1.0, rule=RULES[rule]),
        is_greedy=False,
    )

    # A function of its own: a jit of the same one would not see a mutant.
    def run(tokens, probs, logits, accept, sample, active):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verify_module, "draw_numbers", planned(accept, sample))
            levels = jnp.full(seqs, num_levels, jnp.int32)
            return verify_tree(
                tree,
                Proposal(tokens, levels, probs),
                jnp.concatenate([active.last_tokens[:, 1:], tokens], axis=1),
                logits.reshape(-1, VOCAB),
                levels,
                active,
                Backend(),
                adjust=None,
                forced_acceptance=None,
                max_model_len=1000,
            )

    found = jax.jit(run, compiler_options=UNOPTIMISED)(
        jnp.asarray(drafts[path], jnp.int32),
        jnp.asarray(probs[path], jnp.float32),
        jnp.log(jnp.asarray(target[path], jnp.float32)),
        jnp.asarray(repeat(rows["accept_uniform"])[:, :spine], jnp.float32),
        jnp.asarray(sample, jnp.float32),
        active,
    )
    tokens, row = np.asarray(found.tokens), np.asarray(found.tree_row)
    counts = np.array(tree.depths)[row] + 1
    beside = weight[np.array(tree.depths)[row] > found.num_accepted].sum()
    distribution, own = np.zeros(1), np.ones(1)
    for count in range(1, DRAFTS + 2):
        after = case.target[count - 1]
        distribution = (distribution[:, None] * after).reshape(-1)
        own = (own[:, None] * after).reshape(-1)
        here = counts == count
        np.add.at(distribution, code_of(tokens[here, :count]), weight[here])
    assert distribution.sum() == pytest.approx(1)
    return float(np.abs(own - distribution).sum() / 2), float(beside)


def check_exact_distribution(
    name: str, rule: str, num_levels: int = 3, seeds: tuple[int, ...] = (0,)
) -> None:
    """A round's tokens, completed with draws from the target, follow the target."""
    tree, total = Tree(parents_of(TREES[name])), 0.0
    for seed in seeds:
        distance, beside = distribution_of_round(tree, rule, seed, num_levels)
        assert distance < 1e-6, seed
        total += beside
    assert total / len(seeds) > 0.02


@pytest.mark.parametrize(
    ("name", "rule"), [("leaves", "block"), ("side paths", "standard")]
)
def test_every_outcome_of_a_round_adds_up_to_the_targets_distribution(name, rule):
    check_exact_distribution(name, rule)


@pytest.mark.long_suite(name="counts")
@pytest.mark.parametrize("num_levels", [1, 2, 3])
@pytest.mark.parametrize("rule", ORACLES)
@pytest.mark.parametrize("name", TREES)
def test_so_it_does_whatever_the_rule_and_the_levels_that_count(name, rule, num_levels):
    check_exact_distribution(name, rule, num_levels, seeds=(1, 2, 3))


@pytest.mark.long_suite(name="counts")
@pytest.mark.parametrize("rule", ORACLES)
def test_every_small_tree_keeps_the_distribution(rule):
    """Of up to five drafts, three levels and three siblings, but for the chains."""
    found, beside = 0, 0.0
    for number, paths in enumerate(every_tree(3, 3, 5)):
        tree = Tree(parents_of(paths))
        if not tree.is_chain:
            distance, share = distribution_of_round(tree, rule, number, tree.num_levels)
            assert distance < 1e-6, paths
            found, beside = found + 1, beside + share
    # Of 64 of up to five nodes 9 are deeper, 7 have more siblings and 3 are chains.
    assert found == 45
    assert beside / found > 0.05
