"""Enumerate draft trees."""

import itertools

from jaxspec.config.token_tree import (
    Path,
)


def paths_below(ranks: int, levels: int) -> list[Path]:
    """Return all paths of one to `levels` ranks, each below `ranks`."""
    found: list[Path] = []
    for length in range(1, levels + 1):
        found += itertools.product(range(ranks), repeat=length)
    return found


def every_tree(ranks: int, levels: int, most: int) -> list[frozenset[Path]]:
    """Return all trees with at most `most` drafts, including the empty tree."""
    known = {frozenset[Path]()}
    newest = set(known)
    for _ in range(most):
        newest = {
            tree | {path}
            for tree in newest
            for path in paths_below(ranks, levels)
            if path not in tree
            and (len(path) == 1 or path[:-1] in tree)
            and (path[-1] == 0 or (*path[:-1], path[-1] - 1) in tree)
        }
        known |= newest
    return sorted(known, key=sorted)
