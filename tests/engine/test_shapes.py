"""Every launch has one of few sizes, and it serves what the launch needs."""

import pytest

from jaxspec.engine.controller import Controller
from jaxspec.engine.shapes import Shapes
from jaxspec.program.plan import Features, StepShape
from tests.loops import make_config


def make_shapes(**changes) -> Shapes:
    config = make_config(**changes)
    return Shapes(config, Controller(config.speculative))


def test_shapes_follow_the_prompts_that_are_expected():
    shapes = make_shapes(max_num_seqs=3)
    chunks = {shape.chunk for shape in shapes.all()}
    assert chunks == {0, 32, 128}
    assert {shape.num_seqs for shape in shapes.all()} == {1, 2, 4}
    assert {shape.num_draft_tokens for shape in shapes.all()} == {0, 1, 2, 3}
    assert {shape.chunk for shape in shapes.all(1)} == {0, 32, 128}
    one = make_shapes(max_num_seqs=1)
    assert {shape.chunk for shape in one.all(1)} == {0, 32}
    asked = Features(has_controls=True)
    assert {shape.features for shape in one.all(1, asked)} == {asked}


def test_the_default_engine_has_32_programs():
    shapes = make_shapes(max_num_seqs=8, max_num_batched_tokens=512, num_draft_tokens=5)
    assert len(shapes.all()) == 4 * 5 + 2 * 2 * 3


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8])
def test_every_launch_has_a_listed_size_that_serves_it(max_num_seqs):
    shapes = make_shapes(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=512, num_draft_tokens=5
    )
    listed = shapes.all()
    assert len(set(listed)) == len(listed)
    met = set()
    for num_seqs in range(max_num_seqs + 1):
        for wanted in range(6):
            for tokens in (0, 32, 64, 160, 512):
                for may_feed in {True, tokens > 0}:
                    drafts = shapes.num_draft(wanted, may_feed=may_feed)
                    shape = shapes.of(num_seqs, drafts, tokens)
                    assert shape in listed
                    assert shape.num_seqs >= num_seqs
                    assert shape.num_draft_tokens >= wanted
                    assert (shape.num_draft_tokens > 0) == (wanted > 0)
                    assert shape.chunk >= tokens
                    met.add(shape)
    assert met == set(listed), "a program that no launch needs"


def test_a_launch_alone_has_the_smallest_size():
    shapes = make_shapes(max_num_seqs=8, max_num_batched_tokens=512, num_draft_tokens=5)
    for num_seqs, size in ((1, 1), (2, 2), (3, 4), (5, 8)):
        for wanted, drafts in ((0, 0), (1, 1), (4, 5)):
            found = shapes.of(num_seqs, shapes.num_draft(wanted, may_feed=False))
            assert found == StepShape(num_seqs=size, num_draft_tokens=drafts, chunk=0)


def test_the_same_launch_with_prompts():
    shapes = make_shapes(max_num_seqs=8, max_num_batched_tokens=512, num_draft_tokens=5)
    assert shapes.chunks == (32, 128, 512)
    for num_seqs in (1, 2, 4, 8):
        plain = shapes.of(num_seqs, 5)
        for chunk in shapes.chunks:
            assert shapes.with_prompts(plain, chunk) == shapes.of(num_seqs, 5, chunk)
