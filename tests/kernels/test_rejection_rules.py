"""The acceptance rules of the papers, tested on every outcome."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec_kernels.rejection_sampling import (
    BLOCK,
    STANDARD,
    SamplingValues,
    Verdict,
    reference,
)
from tests.kernels.oracle import UNOPTIMISED
from tests.support import enumeration
from tests.support.enumeration import (
    DRAFTS,
    VOCAB,
    block_oracle,
    constant_case,
    distributions,
    make_cases,
    make_paths,
    outcomes,
    standard_oracle,
)

ORACLES = {STANDARD: standard_oracle, BLOCK: block_oracle}


@pytest.fixture(autouse=True)
def _margin(monkeypatch):
    # In float32 the logarithm of a probability of 2**-12 has an error of 2**-21 times
    # the probability.
    monkeypatch.setattr(enumeration, "MARGIN", 2.0**-18)


def decide(
    tokens, draft_probs, target_logits, num_draft_tokens, *, temperature, **given
):
    """Verify with one rule for all sequences, without filters."""
    seqs = tokens.shape[0]
    ones = jnp.ones(seqs)
    given.setdefault("accept_uniform", jnp.zeros((seqs, DRAFTS)))
    given.setdefault("sample_uniform", jnp.zeros(seqs))
    given["rule"] = jnp.full(seqs, given.get("rule", STANDARD), jnp.int32)
    return reference.rejection_sampling(
        tokens,
        draft_probs,
        target_logits,
        num_draft_tokens,
        SamplingValues(temperature * ones, jnp.zeros(seqs, jnp.int32), ones, 0 * ones),
        noise_words=None,
        vocab_size=VOCAB,
        axis_name=None,
        **given,
    )


def rule_of(rule: int):
    def apply(tokens, draft, target, num_draft_tokens, **uniforms) -> Verdict:
        return decide(
            tokens,
            draft,
            jnp.log(target),
            num_draft_tokens,
            temperature=1.0,
            rule=rule,
            **uniforms,
        )

    return apply, ORACLES[rule]


def test_choices_give_the_text_of_plain_decoding():
    """For any drafts, the accepted tokens are the target's own choices."""
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
    choose = partial(decide, temperature=0.0)
    verdict = jax.jit(choose, compiler_options=UNOPTIMISED)(
        jnp.asarray(tokens, jnp.int32),
        None,
        jnp.asarray(np.eye(VOCAB, dtype=np.float32)[choices]),
        jnp.asarray(count, jnp.int32),
    )
    accepted = np.asarray(verdict.num_accepted)
    assert (accepted <= count).all()
    row = np.arange(len(tokens))
    emitted = np.pad(tokens, ((0, 0), (0, 1)))
    emitted[row, accepted] = verdict.next_token
    is_emitted = np.arange(DRAFTS + 1) <= accepted[:, None]
    assert (emitted == plain)[is_emitted].all()
    # A draft that the target would have chosen is never rejected.
    is_over = accepted == count
    next_draft = emitted[row, accepted]
    disagrees = next_draft != np.pad(tokens, ((0, 0), (0, 1)))[row, accepted]
    assert (is_over | disagrees).all()


def test_cases_cover_the_rules():
    """All kinds of cases occur; otherwise the enumeration would prove less."""
    cases = make_cases()
    paths = make_paths(cases)
    assert len(cases) >= 50
    counts = np.bincount(paths.case, weights=paths.weight)
    np.testing.assert_allclose(counts, 1, atol=1e-12)
    assert set(paths.num_draft_tokens) == {0, 1, 2, 3}
    counted = np.arange(DRAFTS) < paths.num_draft_tokens[:, None]
    chosen = np.take_along_axis(paths.target[:, :-1], paths.tokens[:, :, None], 2)
    assert (chosen[:, :, 0][counted] == 0).any(), "no draft that the target excludes"
    rows = outcomes(paths, block_oracle(paths))
    total = np.bincount(paths.case[rows["path"]], weights=rows["weight"])
    np.testing.assert_allclose(total, 1, atol=1e-9)
    by_kind = {
        distribution.case.kind: distribution
        for distribution in distributions(cases, *rule_of(STANDARD))
    }
    assert by_kind["equal"].mean_accepted == pytest.approx(
        by_kind["equal"].case.num_draft_tokens, abs=1e-4
    )
    assert by_kind["disjoint"].mean_accepted == 0


def test_block_accepts_no_less_than_standard():
    cases = make_cases()
    standard = [
        distribution.mean_accepted
        for distribution in distributions(cases, *rule_of(STANDARD))
    ]
    block = [
        distribution.mean_accepted
        for distribution in distributions(cases, *rule_of(BLOCK))
    ]
    gain = np.array(block) - np.array(standard)
    assert gain.min() >= -1e-9
    assert (gain > 1e-3).mean() >= 0.2


def test_block_rule_gives_the_papers_example():
    """Section 2 of Sun et al.: the block rule accepts 11/9 tokens instead of 10/9."""
    case = constant_case([1 / 3, 2 / 3, 0, 0], [2 / 3, 1 / 3, 0, 0], num_draft_tokens=2)
    for rule, expected in ((STANDARD, 10 / 9), (BLOCK, 11 / 9)):
        (distribution,) = distributions([case], *rule_of(rule))
        assert distribution.mean_accepted == pytest.approx(expected, abs=1e-9)
