"""Trees of drafts as users write them: paths from the newest token, as in vLLM.

`(0,)` is the most probable next token, `(1,)` the second; `(1, 0)` is the most probable
one after that. The device's view of the same is `jaxspec.program.tree.tree`.

Which tree is worth its rows follows from how often drafts of a depth and rank have been
what the target wanted, and from what rounds cost.
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
# Attention sees which rows see which as bits, and the target is fed them all at once.
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
    """The paths of a tree, from vLLM's string of a list of tuples, or from the list.

    Raises:
        ConfigError: It is no such list, or no tree, or too large.
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
    """Refuse what misses a draft that others continue or stand behind."""
    known: set[Path] = set()
    for path in paths:
        if path in known:
            hint = f"{path} is there twice."
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
    """Whether drafts of side branches have children.

    Args:
        parents: As `parents_of` gives them.
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
    """Of each draft the one that it continues, or `ROOT`.

    First the chain of the most probable ones, then the others, level by level: a round
    that stays on the chain finds keys and values where they belong.
    """
    ordered = sorted(paths, key=lambda path: (any(path), len(path), path))
    index = {path: number for number, path in enumerate(ordered)}
    return tuple(index.get(path[:-1], ROOT) for path in ordered)


class Place(NamedTuple):
    """Where a draft stands in a tree; drafts of one place are taken to be alike.

    Attributes:
        is_side: Some draft before it was not the first choice at its place.
        depth: Drafts from the newest token to it, itself included.
        rank: Drafts that come before it, of those that continue the same one.
    """

    is_side: bool
    depth: int
    rank: int


class Hits(NamedTuple):
    """How often drafts of a place were compared with what the target wants, and kept.

    A draft is compared wherever the one that it continues was kept, whatever became of
    those beside it: `rate` is the chance that the target wants it, not that it does
    once it has rejected the others.
    """

    compared: int
    kept: int

    @property
    def rate(self) -> float:
        return self.kept / max(self.compared, 1)


class BestTree(NamedTuple):
    """A tree, and what it should bring.

    Attributes:
        tokens: A round's, on average, the target's own included.
        seconds: That a round should take.
    """

    paths: tuple[Path, ...]
    tokens: float
    seconds: float


# From levels, drafts, and whether drafts beside the spine are continued, the seconds of
# a round.
RoundCost = Callable[[int, int, bool], float]


def count_ranks(
    parents: tuple[int, ...], ends: Mapping[tuple[int, int], int]
) -> dict[Place, Hits]:
    """Count by place what became of the drafts of a tree.

    Args:
        parents: The tree, as `parents_of` has it.
        ends: Rounds, by how many levels counted and by the row at which they ended: 0
            for none, else one more than the last draft that stayed.
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

    By dynamic programming over how the drafts below one are shared out among those that
    continue it: what a draft brings depends on its place alone.

    Args:
        rates: Chance of a draft to be what the target wants, if those before it are; a
            place that is missing has none.

    Returns:
        Its paths, and its mean number of accepted drafts per round.

    References: Chen et al. 2024 (Sequoia), arXiv:2402.12374, section 3.1.
    """
    return _sharing(rates, num_levels)(num_nodes)


def _sharing(
    rates: Mapping[Place, float], num_levels: int
) -> Callable[[int], tuple[tuple[Path, ...], float]]:
    """`most_tokens` by the number of drafts: one knows what another has found out."""
    most = max((place.rank for place in rates), default=-1)

    @functools.cache
    def grow(
        is_side: bool, depth: int, rank: int, count: int
    ) -> tuple[float, tuple[int, ...]]:
        """Share `count` drafts out to those of a rank and above that continue a draft.

        Returns:
            What they bring, and how many stand below each of them.
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
    """The tree that brings the most tokens per second; without paths, plain decoding.

    Args:
        rates: As for `most_tokens`.
        seconds: Of a round. More levels, drafts and side paths may not make it faster.
        num_nodes: Most drafts.
        num_levels: Most of them one after the other.
    """
    best = BestTree((), 1.0, seconds(0, 0, False))
    main_chain = {place: rate for place, rate in rates.items() if not place.is_side}
    for levels in range(1, num_levels + 1):
        # Without rates of side branches, drafts beyond the main chain are leaves.
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
