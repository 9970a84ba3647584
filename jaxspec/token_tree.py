"""Trees of drafts as users write them: paths from the newest token, as in vLLM.

`(0,)` is the most probable next token, `(1,)` the second; `(1, 0)` is the most probable
one after that. The device's view of the same is `jaxspec.program.tree`.
"""

import ast
from collections.abc import Iterable

from jaxspec.errors import ConfigError, wrong_argument

Path = tuple[int, ...]

TREE_KEY = "speculative_token_tree"
# Attention sees which rows see which as bits, and the target is fed them all at once.
MAX_NODES = 64
ROOT = -1


def leaf_paths(num_levels: int, num_leaves: int) -> tuple[Path, ...]:
    """A chain, and at every level the next best tokens beside its own."""
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


def parents_of(paths: Iterable[Path]) -> tuple[int, ...]:
    """Of each draft the one that it continues, or `ROOT`.

    First the chain of the most probable ones, then the others, level by level: a round
    that stays on the chain finds keys and values where they belong.
    """
    ordered = sorted(paths, key=lambda path: (any(path), len(path), path))
    index = {path: number for number, path in enumerate(ordered)}
    return tuple(index.get(path[:-1], ROOT) for path in ordered)
