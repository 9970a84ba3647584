"""Trees as users write them: what is one, what is none, and the order of drafts."""

import pytest

from jaxspec.errors import ConfigError
from jaxspec.token_tree import MAX_NODES, leaf_paths, parents_of, read_paths


@pytest.mark.parametrize(
    "written",
    [
        "[(0,), (0, 0), (1,)]",
        "[(0,),(0,0),(1,)]",
        [(0,), (0, 0), (1,)],
        ((0,), (0, 0), (1,)),
        [[0], [0, 0], [1]],
    ],
)
def test_strings_and_lists_say_the_same(written: object):
    assert read_paths(written) == ((0,), (0, 0), (1,))


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("[(0,), (0, 0", "a list of tuples"),
        ("nonsense", "a list of tuples"),
        ("[(0,), (0.5,)]", "rank of each draft"),
        ("[(0,), (True,)]", "rank of each draft"),
        ("[(0,), ()]", "rank of each draft"),
        ("[(0,), (-1,)]", "rank of each draft"),
        ("{(0,): 1}", "a list of tuples"),
        ("[0, 1]", "a list of tuples"),
        (5, "a list of tuples"),
        ("[]", f"1 to {MAX_NODES} drafts, got '[]'"),
        ("[(0,), (0,)]", "(0,) is there twice"),
        ("[(0,), (1, 0)]", "(1, 0) has no parent: add (1,)"),
        ("[(0,), (0, 0, 0)]", "(0, 0, 0) has no parent: add (0, 0)"),
        ("[(0,), (2,)]", "(2,) comes after (1,), which is missing"),
        ("[(1,)]", "(1,) comes after (0,), which is missing"),
        (str([(n,) for n in range(MAX_NODES + 1)]), f"It has {MAX_NODES + 1}"),
    ],
)
def test_what_is_no_tree_is_told(written: object, told: str):
    with pytest.raises(ConfigError) as caught:
        read_paths(written)
    assert caught.value.parameter == "speculative_token_tree"
    assert caught.value.value == written
    assert told in str(caught.value)


def test_the_most_probable_drafts_come_first_then_the_others_level_by_level():
    paths = [(1, 0), (1,), (0, 1), (0, 0), (0,), (0, 0, 0), (2,), (0, 1, 0)]
    # (0,) (0, 0) (0, 0, 0) (1,) (2,) (0, 1) (1, 0) (0, 1, 0)
    assert parents_of(paths) == (-1, 0, 1, -1, -1, 0, 3, 5)


@pytest.mark.parametrize(("levels", "leaves"), [(1, 1), (3, 1), (2, 3), (5, 0)])
def test_leaves_stand_beside_every_draft(levels: int, leaves: int):
    paths = leaf_paths(levels, leaves)
    assert read_paths(str(list(paths))) == paths
    chain = [-1, *range(levels - 1)]
    beside = [parent for parent in chain for _ in range(leaves)]
    assert parents_of(paths) == (*chain, *beside)
