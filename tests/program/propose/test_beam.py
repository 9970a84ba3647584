"""Trees that grow by what is probable equal those of a search by paths.

The draft is a Markov chain. The oracle knows drafts by the tokens on their way, where
the program has rows, places and ranks.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.program import grown
from jaxspec.program.propose import levels
from jaxspec.program.propose.beam import Beam
from jaxspec.program.tree import DynamicTree
from tests.kernels.oracle import UNOPTIMISED

VOCAB, SEQS, START = 6, 40, 1
TREES = [
    DynamicTree(num_levels=3, top_k=2, num_nodes=7),
    DynamicTree(num_levels=4, top_k=3, num_nodes=16),
    DynamicTree(num_levels=1, top_k=3, num_nodes=2),
    # All that is considered.
    DynamicTree(num_levels=2, top_k=3, num_nodes=12),
]

Path = tuple[int, ...]


def make_laws(seed: int) -> np.ndarray:
    """Log-probabilities of the next token: by sequence, after each token."""
    logits = np.random.default_rng(seed).normal(size=(SEQS, VOCAB, VOCAB)) * 2
    return np.asarray(jax.nn.log_softmax(jnp.asarray(logits, jnp.float32)))


def make_spines(seed: int, tree: DynamicTree) -> np.ndarray:
    """What is drawn: of every other sequence anything, of the others None (-1)."""
    drawn = np.random.default_rng(seed).integers(0, VOCAB, (SEQS, tree.num_levels))
    return np.where(np.arange(SEQS)[:, None] % 2, drawn, -1).astype(np.int32)


def search(
    tree: DynamicTree,
    law_after: Callable[[Path], np.ndarray],
    drawn: Sequence[int],
    num_wanted: int,
) -> tuple[list[Path], set[Path]]:
    """The drafts of one sequence: the spine, and what stands beside it.

    Args:
        law_after: Log-probabilities of the next token after drafts.
        drawn: The spine by level; where it is negative, the most probable.
    """
    spine: list[Path] = [()]
    value: dict[Path, Any] = {(): np.float32(0)}
    going: list[Path] = [()]
    for level in range(num_wanted):
        found: list[Path] = []
        for path in going:
            law = law_after(path)
            ranked = np.argsort(-law, kind="stable").tolist()
            if path == spine[-1] and drawn[level] >= 0:
                ranked.remove(drawn[level])
                ranked.insert(0, drawn[level])
            found += [(*path, token) for token in ranked[: tree.top_k]]
            for token in ranked[: tree.top_k]:
                value[*path, token] = value[path] + law[token]
        first, others = found[0], found[1:]
        spine.append(first)
        others.sort(key=lambda path: -value[path])
        going = [first, *others[: tree.top_k - 1]]
    del value[()]
    beside = sorted(value.keys() - set(spine), key=lambda path: -value[path])
    return spine[1:], set(beside[: tree.num_nodes - tree.num_levels])


@functools.cache
def program_of(tree: DynamicTree):
    def run(laws, drawn, num_wanted):
        seq = jnp.arange(SEQS, dtype=jnp.int32)[:, None]

        def grow(level, beam):
            fed = jnp.pad(beam.tokens, ((0, 0), (1, 0)), constant_values=START)
            rows = grown.continued(tree, level)
            rows = rows[:1] if isinstance(level, int) else rows
            scores = laws[seq, fed[:, rows]]
            best = jnp.argmax(scores[:, 0], axis=1).astype(jnp.int32)
            own = jnp.where(drawn[:, level] < 0, best, drawn[:, level])
            return beam.grow(level, *levels._rank_laws(tree, own, scores))

        beam = grow(0, Beam.empty(tree, SEQS))
        if tree.num_levels > 1:
            beam = jax.lax.fori_loop(1, num_wanted, grow, beam)
        tokens, made = beam.best()
        passed = beam.grown if tree.num_levels > 1 else None
        return tokens, made, beam.tokens, passed

    return jax.jit(run, compiler_options=UNOPTIMISED)


def paths_of(tokens: np.ndarray, parents: np.ndarray) -> list[Path]:
    """Of every row of one sequence the tokens on its way."""
    paths: list[Path] = [()]
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        assert parent < len(paths), "a parent comes before its node"
        paths.append((*paths[parent], token))
    return paths


def check_trees(tree: DynamicTree = TREES[1], num_wanted: int | None = None) -> None:
    num_wanted = tree.num_levels if num_wanted is None else num_wanted
    laws, spines = make_laws(tree.num_nodes), make_spines(3, tree)
    tokens, made, fed, passed = jax.tree.map(
        np.asarray, program_of(tree)(laws, spines, np.int32(num_wanted))
    )
    num_fed = 0
    for seq in range(SEQS):

        def law_after(path: Path, laws: np.ndarray = laws[seq]) -> np.ndarray:
            return laws[path[-1] if path else START]

        spine, beside = search(tree, law_after, spines[seq].tolist(), num_wanted)
        paths = paths_of(tokens[seq], made.row_parents[seq])
        is_draft = made.row_depths[seq] <= tree.num_levels
        assert paths[1 : 1 + num_wanted] == spine
        rows = range(1 + tree.num_levels, tree.num_rows)
        drafts = [paths[row] for row in rows if is_draft[row]]
        assert len(drafts) == len(beside) and set(drafts) == beside, seq
        if num_wanted == tree.num_levels:
            assert is_draft.all()
            assert [len(path) for path in paths] == made.row_depths[seq].tolist()
        if passed is None:
            continue
        # What a draft model was fed a row as is the same draft.
        passes = paths_of(fed[seq], passed.row_parents[seq])
        assert passes[1:num_wanted] == spine[: num_wanted - 1]
        for row in np.flatnonzero(made.draft_rows[seq]):
            assert passes[made.draft_rows[seq][row]] == paths[row]
            num_fed += row > tree.num_levels
        # Whoever is continued was fed.
        above = made.row_parents[seq][made.row_depths[seq][1:] <= num_wanted]
        assert made.draft_rows[seq][above[above > 0]].all()
    assert num_fed or tree.num_levels == 1


@pytest.mark.parametrize("tree", TREES)
def test_drafts_are_those_of_a_search_by_paths(tree: DynamicTree):
    check_trees(tree)


def test_fewer_levels_leave_the_others_without_drafts():
    check_trees(TREES[1], num_wanted=2)


def test_rows_are_those_of_a_walk_to_the_root():
    """As a known tree has them: depths, masks, paths and what is asked of one row."""
    tree = TREES[1]
    laws, spines = make_laws(5), make_spines(4, tree)
    made = program_of(tree)(laws, spines, np.int32(tree.num_levels))[1]
    row = np.random.default_rng(0).integers(0, tree.num_rows, SEQS).astype(np.int32)
    found = [one(made, jnp.asarray(row)) for one in (grown.depth_of, grown.path_to)]
    depth, path = map(np.asarray, found)
    seen = np.asarray(grown.seen_by(made, jnp.asarray(row)))
    mask = np.asarray(grown.ancestor_mask(made, SEQS))
    for seq in range(SEQS):
        parents = tuple(int(one) - 1 for one in made.row_parents[seq])
        known = grown.Tree(parents)
        assert known.depths == tuple(np.asarray(made.row_depths)[seq].tolist())
        assert (known.ancestor_mask == mask[seq]).all()
        assert known.depths[row[seq]] == depth[seq]
        assert known.paths[row[seq]].tolist() == path[seq].tolist()
        assert (known.ancestor_mask[row[seq]] == seen[seq]).all()
