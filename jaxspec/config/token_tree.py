"""Draft trees as users write them: one path per draft, as in vLLM.

A path begins after the newest token: `(0,)` is the most probable next token, `(1,)` the
second most probable, `(1, 0)` the most probable token after `(1,)`.
`jaxspec.program.tree.tree` converts a tree to arrays for the device.

`best_tree` finds the tree with the most expected tokens per second, from acceptance
rates by depth and rank and from the times of rounds.
"""

import ast
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from jaxspec.errors import ConfigError, wrong_argument

Path = tuple[int, ...]

TREE_KEY = "speculative_token_tree"
# Maximum number of drafts of a tree: the attention mask of a tree's row is a 64-bit
# set, and one target pass verifies all drafts.
MAX_NODES = 64
ROOT = -1


def leaf_paths(num_levels: int, num_leaves: int) -> tuple[Path, ...]:
    """Return a chain with the next best tokens of every level as leaves."""
    return tuple(
        (*(0,) * level, rank)
        for level in range(num_levels)
        for rank in range(num_leaves + 1)
    )


def read_paths(written: object) -> tuple[Path, ...]:
    """Return the paths of a tree, given as a list of tuples or (as in vLLM) its text.

    Raises:
        ConfigError: `written` is not such a list, not a tree, or too large.
    """
    allowed = "a list of tuples such as '[(0,), (1,), (0, 0)]'"
    found = written
    if isinstance(written, str):
        try:
            found = ast.literal_eval(written)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as cause:
            raise wrong_argument(ConfigError, TREE_KEY, allowed, written) from cause
    if not isinstance(found, list | tuple) or not all(map(_is_path, found)):
        hint = "A tuple has the rank of each draft among its siblings, from 0."
        raise wrong_argument(ConfigError, TREE_KEY, allowed, written, hint)
    paths = tuple(map(tuple, found))
    if not 1 <= len(paths) <= MAX_NODES:
        allowed = f"a tree of 1 to {MAX_NODES} drafts"
        hint = f"It has {len(paths)}."
        raise wrong_argument(ConfigError, TREE_KEY, allowed, written, hint)
    _check_tree(paths, written)
    return paths


def _is_path(entry: object) -> bool:
    return (
        isinstance(entry, list | tuple)
        and bool(entry)
        and all(type(rank) is int and rank >= 0 for rank in entry)
    )


def _check_tree(paths: tuple[Path, ...], written: object) -> None:
    """Reject duplicate paths, and paths without their parent or previous sibling."""
    known: set[Path] = set()
    for path in paths:
        if path in known:
            hint = f"{path} appears twice."
            raise wrong_argument(ConfigError, TREE_KEY, "a tree", written, hint)
        known.add(path)
    for path in paths:
        before, rank = path[:-1], path[-1]
        if before and before not in known:
            hint = f"{path} has no parent: add {before}."
            raise wrong_argument(ConfigError, TREE_KEY, "a tree", written, hint)
        if rank and (*before, rank - 1) not in known:
            hint = f"{path} comes after {(*before, rank - 1)}, which is missing."
            raise wrong_argument(ConfigError, TREE_KEY, "a tree", written, hint)


def has_side_paths(parents: tuple[int, ...]) -> bool:
    """Return whether a draft off the main chain is continued by further drafts.

    Args:
        parents: Parent of each draft, as `parents_of` returns them.
    """
    chain = range(ROOT, len(parents) - 1)
    length = sum(
        1
        for _ in itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(parents, chain, strict=True)
        )
    )
    return any(parent >= length for parent in parents)


def parents_of(paths: Iterable[Path]) -> tuple[int, ...]:
    """Return the parent of each draft: its index, or `ROOT`.

    The main chain comes first, then the others, level by level: after a round that
    accepts only the main chain, keys and values are in their final places.
    """
    ordered = sorted(paths, key=lambda path: (any(path), len(path), path))
    index = {path: number for number, path in enumerate(ordered)}
    return tuple(index.get(path[:-1], ROOT) for path in ordered)


class Place(NamedTuple):
    """The place of a draft in a tree; drafts of one place share an acceptance rate.

    Attributes:
        is_side: One of its ancestors has a rank above 0.
        depth: Number of drafts on its path, itself included.
        rank: Its rank among its siblings, from 0.
    """

    is_side: bool
    depth: int
    rank: int


class Hits(NamedTuple):
    """How often drafts at a place were compared with the target's token, and accepted.

    A draft counts as compared if its parent was accepted, also if a sibling was: `rate`
    is the probability that the target's token is this draft, not the probability after
    its siblings were rejected.
    """

    compared: int
    kept: int

    @property
    def rate(self) -> float:
        return self.kept / max(self.compared, 1)


class BestTree(NamedTuple):
    """A tree, and its expected tokens and time.

    Attributes:
        tokens: Mean tokens per round, the target's own included.
        seconds: Expected seconds per round.
    """

    paths: tuple[Path, ...]
    tokens: float
    seconds: float


# Returns the seconds of a round, given the tree's depth, its number of drafts, and
# whether side branches are continued.
RoundCost = Callable[[int, int, bool], float]


def count_ranks(
    parents: tuple[int, ...], ends: Mapping[tuple[int, int], int]
) -> dict[Place, Hits]:
    """Count compared and accepted drafts of a tree, by place.

    Args:
        parents: Parent of each draft, as `parents_of` returns them.
        ends: Number of rounds by (levels with drafts, row at which the round ended):
            row 0 if no draft was accepted, else the last accepted draft's index + 1.
    """
    paths: list[Path] = [()]
    ranks = Counter[int]()
    for parent in parents:
        paths.append((*paths[parent + 1], ranks[parent]))
        ranks[parent] += 1
    compared, kept = Counter[Place](), Counter[Place]()
    for (levels, row), count in ends.items():
        way = {paths[row][:length] for length in range(len(paths[row]) + 1)}
        for path in paths[1:]:
            if len(path) > levels or path[:-1] not in way:
                continue
            place = Place(any(path[:-1]), len(path), path[-1])
            compared[place] += count
            kept[place] += count * (path in way)
    return {place: Hits(compared[place], kept[place]) for place in sorted(compared)}


def most_tokens(
    rates: Mapping[Place, float], num_nodes: int, num_levels: int
) -> tuple[tuple[Path, ...], float]:
    """Return the tree, limited in drafts and levels, with the most expected tokens.

    Dynamic programming over the division of drafts among siblings: the expected tokens
    of a subtree depend only on its place and size.

    Args:
        rates: Probability that a draft is the target's token if its ancestors are; a
            place that is not in the mapping has probability 0.

    Returns:
        Its paths, and its mean number of accepted drafts per round.

    References: Chen et al. 2024 (Sequoia), arXiv:2402.12374, section 3.1.
    """
    return _sharing(rates, num_levels)(num_nodes)


def _sharing(
    rates: Mapping[Place, float], num_levels: int
) -> Callable[[int], tuple[tuple[Path, ...], float]]:
    """Return `most_tokens` as a function of the number of drafts, with cached parts."""
    most = max((place.rank for place in rates), default=-1)

    @functools.cache
    def grow(
        is_side: bool, depth: int, rank: int, count: int
    ) -> tuple[float, tuple[int, ...]]:
        """Divide `count` drafts among the siblings from `rank` on, with their subtrees.

        Returns:
            Their expected accepted drafts, and the number of drafts below each sibling.
        """
        best: tuple[float, tuple[int, ...]] = 0.0, ()
        if rank > most or depth > num_levels:
            return best
        rate = rates.get(Place(is_side, depth, rank), 0.0)
        for below in range(count):
            gain, rest = grow(is_side, depth, rank + 1, count - 1 - below)
            gain += rate * (1 + grow(is_side or rank > 0, depth + 1, 0, below)[0])
            if gain > best[0]:
                best = gain, (below, *rest)
        return best

    def written(path: Path, count: int) -> list[Path]:
        _, shares = grow(any(path), len(path) + 1, 0, count)
        found = []
        for rank, below in enumerate(shares):
            found += [(*path, rank), *written((*path, rank), below)]
        return found

    return lambda count: (tuple(written((), count)), grow(False, 1, 0, count)[0])


def best_tree(
    rates: Mapping[Place, float],
    seconds: RoundCost,
    *,
    num_nodes: int,
    num_levels: int,
) -> BestTree:
    """Return the tree with the most tokens per second; no paths mean plain decoding.

    Args:
        rates: As for `most_tokens`.
        seconds: Seconds of a round; must not decrease with levels, drafts or side
            branches.
        num_nodes: Maximum number of drafts.
        num_levels: Maximum depth.
    """
    best = BestTree((), 1.0, seconds(0, 0, False))
    main_chain = {place: rate for place, rate in rates.items() if not place.is_side}
    for levels in range(1, num_levels + 1):
        # First without the rates of side branches: then all drafts off the main chain
        # are leaves, which may cost less than continued branches.
        for known in (main_chain, rates):
            share = _sharing(known, levels)
            for count in range(levels, num_nodes + 1):
                paths, gain = share(count)
                depth = max(map(len, paths), default=0)
                has_side_paths = any(any(path[:-1]) for path in paths)
                cost = seconds(depth, len(paths), has_side_paths)
                if (1 + gain) / cost > best.tokens / best.seconds:
                    best = BestTree(paths, 1 + gain, cost)
    return best
