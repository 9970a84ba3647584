"""The rules give exactly the target's distribution; verdicts equal float64 loops."""

import functools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import config

from jaxspec.program import plan
from jaxspec_kernels.rejection_sampling import (
    BLOCK,
    COUPLED,
    STANDARD,
    SamplingValues,
    reference,
    rejection_sampling,
)
from tests.kernels.oracle import UNOPTIMISED
from tests.kernels.rejection_rounds import (
    KINDS,
    by_loops,
    make_round,
    plain_sampling_values,
    run,
    tiled,
    with_kind,
)
from tests.support import enumeration
from tests.support.enumeration import (
    DRAFTS,
    VOCAB,
    Distribution,
    block_oracle,
    constant_case,
    make_cases,
    make_paths,
    outcomes,
    standard_oracle,
)

ORACLES = {STANDARD: standard_oracle, BLOCK: block_oracle}

by_public_name = jax.jit(rejection_sampling, compiler_options=UNOPTIMISED)


@pytest.fixture(autouse=True)
def _margin(monkeypatch):
    # In float32 the logarithm of a probability of 2**-12 has an error of 2**-21 times
    # the probability.
    monkeypatch.setattr(enumeration, "MARGIN", 2.0**-18)


# Section 2 of Sun et al.: the block rule accepts 11/9 tokens instead of 10/9.
PAPERS_EXAMPLE = constant_case(
    [1 / 3, 2 / 3, 0, 0], [2 / 3, 1 / 3, 0, 0], num_valid_drafts=2
)


@functools.cache
def found_by(rule: int) -> list[Distribution]:
    """Run a rule on every outcome of every case."""

    def apply(tokens, draft, target, num_valid_drafts, **uniforms):
        seqs = tokens.shape[0]
        return reference.rejection_sampling(
            tokens,
            draft,
            jnp.log(target),  # rows that do not count hold NaN
            num_valid_drafts,
            plain_sampling_values(seqs),
            rule=jnp.full(seqs, rule, jnp.int32),
            noise_words=None,
            vocab_size=VOCAB,
            axis_name=None,
            tile=3,
            **uniforms,
        )

    cases = [*make_cases(), PAPERS_EXAMPLE]
    return enumeration.distributions(cases, apply, ORACLES[rule])


@pytest.mark.parametrize("rule", ORACLES)
def test_emitted_tokens_follow_the_target_exactly(rule):
    """The exact distribution of a round's K + 1 tokens equals the target's."""
    for one in found_by(rule):
        assert one.distance <= 1e-6, (one.case.kind, one.case.num_valid_drafts)
    by_kind = {one.case.kind: one for one in found_by(rule)}
    assert by_kind["equal"].mean_accepted == pytest.approx(
        by_kind["equal"].case.num_valid_drafts, abs=1e-4
    )
    assert by_kind["disjoint"].mean_accepted == 0


def test_cases_cover_the_rules():
    """All kinds of cases occur; otherwise the enumeration would prove less."""
    cases = make_cases()
    paths = make_paths(cases)
    assert len(cases) >= 50
    counts = np.bincount(paths.case, weights=paths.weight)
    np.testing.assert_allclose(counts, 1, atol=1e-12)
    assert set(paths.num_valid_drafts) == {0, 1, 2, 3}
    counted = np.arange(DRAFTS) < paths.num_valid_drafts[:, None]
    chosen = np.take_along_axis(paths.target[:, :-1], paths.tokens[:, :, None], 2)
    assert (chosen[:, :, 0][counted] == 0).any(), "no draft that the target excludes"
    rows = outcomes(paths, block_oracle(paths))
    total = np.bincount(paths.case[rows["path"]], weights=rows["weight"])
    np.testing.assert_allclose(total, 1, atol=1e-9)


def test_block_accepts_no_less_than_standard():
    standard, block = (
        np.array([one.mean_accepted for one in found_by(rule)])
        for rule in (STANDARD, BLOCK)
    )
    assert (block - standard).min() >= -1e-9
    assert (block - standard > 1e-3).mean() >= 0.2


def test_block_rule_gives_the_papers_example():
    for rule, expected in ((STANDARD, 10 / 9), (BLOCK, 11 / 9)):
        assert found_by(rule)[-1].mean_accepted == pytest.approx(expected, abs=1e-9)


# Most tests have four tiles of 16; the last overlaps the third.
@pytest.mark.parametrize(
    "tile", [*(pytest.param(one, marks=pytest.mark.slow) for one in (50, 7)), 2048]
)
def test_tile_size_does_not_matter(tile):
    for seed in range(6, 9):
        one = make_round(seed=seed)
        np.testing.assert_array_equal(run(one, tile), by_loops(one))


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_batch_of_one_rule_equals_loops(kind, drafts):
    """Passes that no sequence needs are skipped."""
    one = with_kind(make_round(drafts=drafts, seed=4, is_filtered=False), kind)
    np.testing.assert_array_equal(run(one), by_loops(one))


def test_rules_are_numbered_as_in_the_plan():
    assert (STANDARD, BLOCK, COUPLED) == (plan.STANDARD, plan.BLOCK, plan.COUPLED)


def test_rounds_cover_the_rules():
    """All kinds of rounds occur; otherwise the tests above would prove less."""
    one = make_round()
    accepted, _ = run(one)
    for kind in KINDS:
        here = one.kind == kind
        assert set(accepted[here]) >= {0, 3}
        assert (accepted < one.num_valid_drafts)[here].any()
    assert set(one.num_valid_drafts) == {0, 1, 2, 3}


def test_bfloat16_logits_equal_their_float32_values():
    one = make_round(seed=2)
    small = jnp.asarray(one.logits, jnp.bfloat16)
    wide = replace(one, logits=np.asarray(small, np.float32))
    given = [*one.arrays]
    given[2] = small
    found = tiled()(*given, **one.numbers)
    np.testing.assert_array_equal(found, by_loops(wide))


def test_public_function_equals_loops_with_and_without_noise():
    """Without noise, a coupled sequence follows the standard rule."""
    one = make_round(seed=6)
    found = by_public_name(*one.arrays, **one.numbers)
    np.testing.assert_array_equal(found, by_loops(one))
    found = by_public_name(*one.arrays, **one.numbers | dict(noise_words=None))
    kind = np.where(one.kind == COUPLED, STANDARD, one.kind)
    np.testing.assert_array_equal(found, by_loops(replace(one, kind=kind)))


@pytest.mark.parametrize("name", ["tpu", "gpu"])
def test_named_implementation_is_not_replaced(name):
    one = make_round(8)
    with pytest.raises(ValueError, match="interpret mode is supported on CPU"):
        rejection_sampling(*one.arrays, **one.numbers, implementation=name)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("draft_tokens", (8, 4)),
        ("draft_tokens", (7, 3)),
        ("draft_probs", (8, 3, 49)),
        ("draft_probs", (8, 2, 50)),
        ("target_logits", (8, 3, 50)),
        ("target_logits", (32, 50)),
        ("target_logits", (8, 0, 50)),
        ("num_valid_drafts", (7,)),
        ("rule", (8, 1)),
        ("accept_uniform", (8, 4)),
        ("sample_uniform", (1,)),
        ("noise_words", (8, 3, 2)),
        ("temperature", (7,)),
        ("top_k", (8, 4)),
        ("top_p", (1,)),
        ("min_p", ()),
    ],
)
def test_shapes_that_do_not_fit_are_an_error(name, shape, monkeypatch):
    """Type annotations are not checked here, as when a user calls the function."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)
    one = make_round(8)
    names = "draft_tokens", "draft_probs", "target_logits", "num_valid_drafts"
    given: dict[str, Any] = dict(zip(names, one.arrays, strict=False)) | one.numbers
    given["sampling_values"] = one.sampling_values
    if name in SamplingValues._fields:
        changed = {name: jnp.zeros(shape)}
        given["sampling_values"] = one.sampling_values._replace(**changed)
    else:
        given[name] = jnp.zeros(shape, given[name].dtype)
    with pytest.raises(ValueError, match=re.escape(str(shape))) as raised:
        rejection_sampling(**given)
    # Other shapes are compared with that of the logits, so the error may name another
    # array if the logits are wrong.
    assert name == "target_logits" or str(raised.value).startswith(name)
