"""The exact distribution of a round over a tree, by running it on every outcome.

The main chain is verified with the uniforms of `tests.support.enumeration`. Tokens on
side branches are sampled with `PARTS` evenly spaced uniforms: the target's
probabilities are multiples of 1 / `PARTS`, so all of these have equal weight, and the
weights of outcomes are summed. Side branches hold arbitrary tokens, including equal
siblings.

Coupled and greedy sequences are deterministic: `test_side_branches.py` compares their
tokens with plain decoding.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.token_tree import leaf_paths, parents_of
from jaxspec.program import randomness
from jaxspec.program import verify as verify_module
from jaxspec.program.plan import RULES
from jaxspec.program.propose import Proposal
from jaxspec.program.rows import Active
from jaxspec.program.sampling import Numbers
from jaxspec.program.tree.tree import Tree
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
from tests.support.trees import every_tree, verify_tree

# Probabilities are multiples of one fourth, zeros among them.
PARTS = 4
START = 7
ORACLES = {"standard": standard_oracle, "block": block_oracle}
TREES = {
    "leaves": leaf_paths(3, 1),
    # Side branches of several levels.
    "side paths": ((0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0)),
}


def random_distributions(random: np.random.Generator, level: int) -> np.ndarray:
    """Return a distribution for every prefix of `level` tokens."""
    weights = random.dirichlet(np.full(VOCAB, 3.0), VOCAB**level)
    return random.multinomial(PARTS, weights) / PARTS


def make_case(seed: int, tree: Tree, num_levels: int) -> Case:
    """Return random distributions; in every third case drafts are point masses."""
    random = np.random.default_rng(seed)
    draft = [random_distributions(random, level) for level in range(DRAFTS)]
    if seed % 3 == 2:
        draft = [np.eye(VOCAB)[distribution.argmax(axis=1)] for distribution in draft]
    return Case(
        kind="tree",
        target=[random_distributions(random, level) for level in range(DRAFTS + 1)],
        draft=draft,
        num_valid_drafts=min(num_levels, tree.main_chain.num_nodes),
    )


def all_drafts(tree: Tree, main_chain: np.ndarray, seed: int) -> np.ndarray:
    """Return the draft tokens of each node.

    Tokens on side branches depend only on the main chain's.
    """
    count = tree.main_chain.num_nodes
    code = main_chain[:, :count] @ (VOCAB ** np.arange(count))
    random = np.random.default_rng(seed)
    side = random.integers(0, VOCAB, (VOCAB**count, tree.num_nodes - count))
    return np.concatenate([main_chain[:, :count], side[code]], axis=1)


def code_of(tokens: np.ndarray) -> np.ndarray:
    """Return the index of a prefix among all prefixes of its length."""
    return tokens @ (VOCAB ** np.arange(tokens.shape[1])[::-1])


def rows_of_target(tree: Tree, drafts: np.ndarray, case: Case) -> np.ndarray:
    """Return the target's distribution at every row of the tree."""
    found = np.empty((len(drafts), tree.num_rows, VOCAB))
    for row in range(tree.num_rows):
        depth = tree.depths[row]
        path = tree.paths[row][1 : depth + 1] - 1
        found[:, row] = case.target[depth][code_of(drafts[:, path])]
    return found


def planned(accept: jax.Array, sample: jax.Array) -> Any:
    """Return a substitute for `draw_numbers`, with the uniforms of an outcome.

    Args:
        accept: By draft; only for the position where the round starts.
        sample: By distance of the position from there.
    """

    def draw(active: Active, purposes: Any, first: Any, *, width: int) -> Numbers:
        seqs = sample.shape[0]
        offset = jnp.broadcast_to(active.num_tokens[:, None] - START, (seqs, 1))
        drawn = jnp.take_along_axis(sample, offset, axis=1)
        parts = [drawn]
        if width > 1:
            # At any other position, an accept uniform is NaN, as it must not be used.
            parts.insert(0, jnp.where(offset == 0, accept[:, : width - 1], jnp.nan))
        expected = [randomness.ACCEPT] * (width - 1) + [randomness.SAMPLE]
        is_known = purposes % randomness.NUM_ROLES == jnp.array([expected])
        uniform = jnp.where(is_known, jnp.concatenate(parts, axis=1), jnp.nan)
        return Numbers(uniform, jnp.zeros((seqs, width, 2), jnp.uint32))

    return draw


def distribution_of_round(
    tree: Tree, rule: str, seed: int, num_levels: int
) -> tuple[float, float]:
    """Run every outcome of a round.

    Returns:
        Total variation between the round's distribution and the target's, and the
        probability that a draft of a side branch is accepted.
    """
    case = make_case(seed, tree, num_levels)
    paths = make_paths([case])
    with pytest.MonkeyPatch.context() as patch:
        # Logarithms of probabilities are rounded, so thresholds of uniforms are too.
        patch.setattr(enumeration, "MARGIN", 2.0**-18)
        rows = outcomes(paths, ORACLES[rule](paths))
    # Each later position has all evenly spaced uniforms, in every combination.
    places = tree.num_levels
    grid = np.indices((PARTS,) * places).reshape(places, -1).T
    repeat = functools.partial(np.repeat, repeats=len(grid), axis=0)
    path, weight = repeat(rows["path"]), repeat(rows["weight"]) / len(grid)
    later = np.tile((grid + 0.5) / PARTS, (len(rows["path"]), 1))
    sample = np.concatenate([repeat(rows["sample_uniform"])[:, None], later], axis=1)
    drafts = all_drafts(tree, paths.tokens, seed)
    target = rows_of_target(tree, drafts, case)
    chain_len = tree.main_chain.num_nodes
    probs = np.nan_to_num(paths.draft[:, :chain_len])
    seqs = len(path)
    active = dataclasses.replace(
        make_active(seqs, num_tokens=START, temperature=1.0, rule=RULES[rule]),
        all_greedy=False,
    )

    # Jit a new function, because a cached trace would not contain a mutant.
    def run(tokens, probs, logits, accept, sample, active):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verify_module, "draw_numbers", planned(accept, sample))
            levels = jnp.full(seqs, num_levels, jnp.int32)
            return verify_tree(
                tree,
                Proposal(tokens, levels, probs),
                logits.reshape(-1, VOCAB),
                levels,
                active,
                max_model_len=1000,
            )

    found = jax.jit(run, compiler_options=UNOPTIMISED)(
        jnp.asarray(drafts[path], jnp.int32),
        jnp.asarray(probs[path], jnp.float32),
        jnp.log(jnp.asarray(target[path], jnp.float32)),
        jnp.asarray(repeat(rows["accept_uniform"])[:, :chain_len], jnp.float32),
        jnp.asarray(sample, jnp.float32),
        active,
    )
    tokens, row = np.asarray(found.tokens), np.asarray(found.tree_row)
    counts = np.array(tree.depths)[row] + 1
    side = weight[np.array(tree.depths)[row] > found.num_accepted].sum()
    distribution, own = np.zeros(1), np.ones(1)
    for count in range(1, DRAFTS + 2):
        after = case.target[count - 1]
        distribution = (distribution[:, None] * after).reshape(-1)
        own = (own[:, None] * after).reshape(-1)
        here = counts == count
        np.add.at(distribution, code_of(tokens[here, :count]), weight[here])
    assert distribution.sum() == pytest.approx(1)
    return float(np.abs(own - distribution).sum() / 2), float(side)


def check_exact_distribution(
    name: str, rule: str, num_levels: int = 3, seeds: tuple[int, ...] = (0,)
) -> None:
    """Check that tokens follow the target.

    A round with fewer than all tokens is completed with draws from the target.
    """
    tree, total = Tree(parents_of(TREES[name])), 0.0
    for seed in seeds:
        distance, side = distribution_of_round(tree, rule, seed, num_levels)
        assert distance < 1e-6, seed
        total += side
    assert total / len(seeds) > 0.02


@pytest.mark.parametrize(
    ("name", "rule"), [("leaves", "block"), ("side paths", "standard")]
)
def test_outcomes_of_a_round_sum_to_the_targets_distribution(name, rule):
    check_exact_distribution(name, rule)


@pytest.mark.long_suite(name="counts")
@pytest.mark.parametrize("num_levels", [1, 2, 3])
@pytest.mark.parametrize("rule", ORACLES)
@pytest.mark.parametrize("name", TREES)
def test_exact_distribution_for_all_rules_and_levels(name, rule, num_levels):
    check_exact_distribution(name, rule, num_levels, seeds=(1, 2, 3))


@pytest.mark.long_suite(name="counts")
@pytest.mark.parametrize("rule", ORACLES)
def test_every_small_tree_keeps_the_distribution(rule):
    """Test all trees of up to five drafts, three levels and three siblings.

    Chains are left out.
    """
    found, side = 0, 0.0
    for number, paths in enumerate(every_tree(3, 3, 5)):
        tree = Tree(parents_of(paths))
        if not tree.is_chain:
            distance, share = distribution_of_round(tree, rule, number, tree.num_levels)
            assert distance < 1e-6, paths
            found, side = found + 1, side + share
    # There are 64 trees of up to five nodes: 9 are deeper, 7 have more siblings, and 3
    # are chains.
    assert found == 45
    assert side / found > 0.05
