"""Every acceptance rule, on every outcome: the emitted tokens follow the target."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.program import verify
from tests.enumeration import (
    DRAFTS,
    LARGEST_UNIFORM,
    VOCAB,
    block_oracle,
    constant_case,
    laws,
    make_cases,
    make_paths,
    outcomes,
    run_rule,
    standard_oracle,
)

ORACLES = {"standard": standard_oracle, "block": block_oracle}
LIMIT = 1e-6


def rule_of(name: str):
    # By name, when it is run: a mutant may have taken the function's place.
    return getattr(verify, f"verify_{name}")


def check_law(name: str, count: int = 72) -> None:
    """The law of all K + 1 tokens is the target's, for every case."""
    for law in laws(make_cases(count), rule_of(name), ORACLES[name]):
        assert law.distance <= LIMIT, (law.case.kind, law.case.num_draft, law.distance)


def check_choices() -> None:
    """Whatever is drafted, the tokens are those of the target's own choices."""
    random = np.random.default_rng(0)
    every = np.indices((VOCAB,) * DRAFTS).reshape(DRAFTS, -1).T
    rows = []
    for trial in range(60):
        own = [random.integers(0, VOCAB, VOCAB**level) for level in range(DRAFTS + 1)]
        plain, prefix = [], 0
        for level in own:
            plain.append(level[prefix])
            prefix = prefix * VOCAB + level[prefix]
        for tokens in every:
            prefix, choices = 0, [own[0][0]]
            for level, token in zip(own[1:], tokens, strict=True):
                prefix = prefix * VOCAB + token
                choices.append(level[prefix])
            rows.append((tokens, choices, trial % (DRAFTS + 1), plain))
    columns = zip(*rows, strict=True)
    tokens, choices, count, plain = (np.array(column) for column in columns)
    verdict = verify.verify_choices(
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(choices, jnp.int32),
        jnp.asarray(count, jnp.int32),
    )
    accepted = np.asarray(verdict.num_accepted)
    assert (accepted <= count).all()
    row = np.arange(len(tokens))
    emitted = np.pad(tokens, ((0, 0), (0, 1)))
    emitted[row, accepted] = verdict.next_token
    is_emitted = np.arange(DRAFTS + 1) <= accepted[:, None]
    assert (emitted == plain)[is_emitted].all()
    # And no draft is turned away that the target would have chosen.
    is_over = accepted == count
    next_draft = emitted[row, accepted]
    disagrees = next_draft != np.pad(tokens, ((0, 0), (0, 1)))[row, accepted]
    assert (is_over | disagrees).all()


@pytest.mark.parametrize("name", ORACLES)
def test_emitted_tokens_follow_the_target_exactly(name):
    check_law(name)


def test_choices_give_the_text_of_plain_decoding():
    check_choices()


def test_cases_hold_what_they_should():
    """Otherwise the enumeration above would prove less than it says."""
    cases = make_cases()
    paths = make_paths(cases)
    assert len(cases) >= 50
    counts = np.bincount(paths.case, weights=paths.weight)
    np.testing.assert_allclose(counts, 1, atol=1e-12)
    assert set(paths.num_draft) == {0, 1, 2, 3}
    counted = np.arange(DRAFTS) < paths.num_draft[:, None]
    chosen = np.take_along_axis(paths.target[:, :-1], paths.tokens[:, :, None], 2)
    assert (chosen[:, :, 0][counted] == 0).any(), "no draft that the target excludes"
    rows = outcomes(paths, block_oracle(paths))
    total = np.bincount(paths.case[rows["path"]], weights=rows["weight"])
    np.testing.assert_allclose(total, 1, atol=1e-9)
    by_kind = {law.case.kind: law for law in laws(cases, *_rule("standard"))}
    assert by_kind["equal"].mean_accepted == pytest.approx(
        by_kind["equal"].case.num_draft
    )
    assert by_kind["disjoint"].mean_accepted == 0


def _rule(name: str):
    return rule_of(name), ORACLES[name]


def test_block_accepts_no_less_than_standard():
    cases = make_cases()
    standard = [law.mean_accepted for law in laws(cases, *_rule("standard"))]
    block = [law.mean_accepted for law in laws(cases, *_rule("block"))]
    gain = np.array(block) - np.array(standard)
    assert gain.min() >= -1e-9
    assert (gain > 1e-3).mean() >= 0.2


def test_example_of_the_block_paper():
    """Sun et al., section 2: 10/9 accepted tokens become 11/9."""
    case = constant_case([1 / 3, 2 / 3, 0, 0], [2 / 3, 1 / 3, 0, 0], num_draft=2)
    for name, expected in (("standard", 10 / 9), ("block", 11 / 9)):
        (law,) = laws([case], *_rule(name))
        assert law.mean_accepted == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", ORACLES)
def test_uniform_zero_accepts_no_excluded_token(name):
    verdict = rule_of(name)(
        jnp.array([[1, 2, 0]], jnp.int32),
        jnp.full((1, DRAFTS, VOCAB), 0.25),
        jnp.broadcast_to(jnp.array([0.5, 0.0, 0.5, 0.0]), (1, DRAFTS + 1, VOCAB)),
        jnp.array([3], jnp.int32),
        accept_uniform=jnp.zeros((1, DRAFTS)),
        sample_uniform=jnp.zeros(1),
    )
    assert int(verdict.num_accepted[0]) == 0
    assert int(verdict.next_token[0]) == 0


@pytest.mark.parametrize("name", ORACLES)
def test_largest_uniform_accepts_equal_probabilities(name):
    law = jnp.broadcast_to(jnp.array([0.1, 0.2, 0.3, 0.4]), (1, DRAFTS + 1, VOCAB))
    verdict = rule_of(name)(
        jnp.array([[0, 1, 2]], jnp.int32),
        law[:, :-1],
        law,
        jnp.array([3], jnp.int32),
        accept_uniform=jnp.full((1, DRAFTS), LARGEST_UNIFORM, jnp.float32),
        sample_uniform=jnp.zeros(1),
    )
    assert int(verdict.num_accepted[0]) == DRAFTS


def check_empty_residual() -> None:
    """Rejected though the laws are equal (rounding): the target's law is drawn."""
    target = jnp.broadcast_to(jnp.array([0.0, 0.25, 0.75, 0.0]), (1, 4, VOCAB))
    weights = verify.residual_weights(
        target[:, :-1],
        target,
        jnp.array([3], jnp.int32),
        jnp.array([1], jnp.int32),
        jnp.ones(1),
    )
    np.testing.assert_array_equal(weights, target[:, 0])


def test_empty_residual_falls_back_to_the_target():
    check_empty_residual()


def test_residual_weights_equal_the_oracle():
    random = np.random.default_rng(3)
    count = 400
    target = random.dirichlet(np.ones(VOCAB), (count, DRAFTS + 1)).astype(np.float32)
    draft = random.dirichlet(np.ones(VOCAB), (count, DRAFTS)).astype(np.float32)
    num_draft = random.integers(0, DRAFTS + 1, count)
    accepted = random.integers(0, num_draft + 1)
    scale = random.random(count).astype(np.float32)
    found = jax.jit(verify.residual_weights)(
        jnp.asarray(draft),
        jnp.asarray(target),
        jnp.asarray(num_draft, jnp.int32),
        jnp.asarray(accepted, jnp.int32),
        jnp.asarray(scale),
    )
    for row in range(count):
        own = target[row, accepted[row]].astype(np.float64)
        expected = own
        if accepted[row] < num_draft[row]:
            rest = np.maximum(scale[row] * own - draft[row, accepted[row]], 0)
            expected = rest if rest.sum() > 0 else own
        np.testing.assert_allclose(found[row], expected, atol=1e-7)


def test_uniforms_past_the_last_draft_are_ignored():
    paths = make_paths(make_cases(14))
    rows = outcomes(paths, standard_oracle(paths))
    before = run_rule(verify.verify_standard, paths, rows)
    counted = np.arange(DRAFTS) < paths.num_draft[rows["path"]][:, None]
    changed = np.where(counted, rows["accept_uniform"], 0.9)
    after = run_rule(verify.verify_standard, paths, rows | {"accept_uniform": changed})
    np.testing.assert_array_equal(before, after)
