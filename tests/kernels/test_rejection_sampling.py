"""Verdicts from logits that are read in tiles equal those of whole rows."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import config

from jaxspec.models.backend import Backend
from jaxspec.program import plan
from jaxspec.program.tree.tree import Tree
from jaxspec.program.verify import verify
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
    GREEDY,
    RULES,
    START,
    Round,
    by_whole_rows,
    make_round,
    plain_sampling_values,
    run,
    tiled,
    with_kind,
)
from tests.support import enumeration
from tests.support.distributions import check_counts, filtered_distribution
from tests.support.enumeration import VOCAB, block_oracle, make_cases, standard_oracle
from tests.support.rows import make_active

ORACLES = {STANDARD: standard_oracle, BLOCK: block_oracle}


by_public_name = jax.jit(rejection_sampling, compiler_options=UNOPTIMISED)


@pytest.mark.parametrize("tile", [pytest.param(50, marks=pytest.mark.slow), 2048, 7])
def test_tile_size_does_not_matter(tile):
    for seed in range(6, 9):
        one = make_round(seed=seed)
        np.testing.assert_array_equal(run(one, tile), by_whole_rows(one))


def test_rules_are_numbered_as_in_the_plan():
    assert (STANDARD, BLOCK, COUPLED) == (plan.STANDARD, plan.BLOCK, plan.COUPLED)


def test_rounds_cover_the_rules():
    """All kinds of rounds occur; otherwise the tests above would prove less."""
    one = make_round()
    accepted, _ = run(one)
    for kind in RULES.values():
        here = one.kind == kind
        assert set(accepted[here]) >= {0, 3}
        assert (accepted < one.num_draft_tokens)[here].any()
    assert set(one.num_draft_tokens) == {0, 1, 2, 3}


def check_distribution(rule: int, count: int = 45) -> None:
    """The exact distribution of a round's K + 1 tokens equals the target's."""

    def apply(
        tokens, draft, target, num_draft_tokens, *, accept_uniform, sample_uniform
    ):
        seqs = tokens.shape[0]
        return reference.rejection_sampling(
            tokens,
            draft,
            jnp.log(target),  # rows that do not count hold NaN
            num_draft_tokens,
            plain_sampling_values(seqs),
            rule=jnp.full(seqs, rule, jnp.int32),
            accept_uniform=accept_uniform,
            sample_uniform=sample_uniform,
            noise_words=None,
            vocab_size=VOCAB,
            axis_name=None,
            tile=3,
        )

    for distribution in enumeration.distributions(
        make_cases(count), apply, ORACLES[rule]
    ):
        assert distribution.distance <= 1e-6, (
            distribution.case.kind,
            distribution.case.num_draft_tokens,
            distribution.distance,
        )


@pytest.mark.parametrize("rule", ORACLES)
def test_emitted_tokens_follow_the_target_exactly(rule, monkeypatch):
    # In float32 the logarithm of a probability of 2**-12 has an error of 2**-21 times
    # the probability.
    monkeypatch.setattr(enumeration, "MARGIN", 2.0**-18)
    check_distribution(rule)


@pytest.mark.parametrize("is_certain", [False, True])
@pytest.mark.parametrize("rule", ["standard", "block", "coupled"])
def test_first_two_tokens_follow_the_filtered_target(rule, is_certain):
    """A chi-square test over many seeds; a certain draft has no probabilities."""
    seqs, vocab = 40_000, 7
    random = np.random.default_rng(5)
    # Two drafts; the second row's distribution depends on the first token.
    table = random.normal(size=(vocab + 1, vocab)).astype(np.float32) * 1.5
    values: dict[str, Any] = dict(temperature=0.8, top_k=5, top_p=0.95, min_p=0.02)
    distribution = filtered_distribution(table, *values.values())
    own = np.full((vocab + 1, vocab), 1 / vocab)
    first = random.choice(vocab, seqs, p=own[vocab])
    tokens = np.stack([first, random.integers(0, vocab, seqs)], axis=1)
    if is_certain:
        best = distribution[vocab].argmax()
        tokens = np.broadcast_to([best, distribution[best].argmax()], tokens.shape)
    logits = np.stack([table[np.full(seqs, vocab)], *table[tokens.T]], axis=1)
    # Coupled drafts may share the target's noise. Drafts that do not use it are also
    # verified correctly.
    words = random.integers(0, 2**32, (seqs, 3, 2), dtype=np.uint32)
    verdict = by_public_name(
        jnp.asarray(tokens, jnp.int32),
        None if is_certain else jnp.full((seqs, 2, vocab), 1 / vocab, jnp.float32),
        jnp.asarray(logits),
        jnp.full(seqs, 2, jnp.int32),
        plain_sampling_values(seqs, **values),
        rule=jnp.full(seqs, RULES[rule], jnp.int32),
        accept_uniform=jnp.asarray(random.random((seqs, 2)), jnp.float32),
        sample_uniform=jnp.asarray(random.random(seqs), jnp.float32),
        noise_words=jnp.asarray(words),  # only the coupled rule uses them
    )
    accepted, following = np.asarray(verdict.num_accepted), np.asarray(verdict[1])
    assert len(set(accepted)) == 3
    emitted = np.where(accepted > 0, tokens[:, 0], following)
    check_counts(np.bincount(emitted, minlength=vocab), distribution[vocab], rule)
    for start in range(vocab):
        here = (accepted > 0) & (tokens[:, 0] == start)
        second = np.where(accepted > 1, tokens[:, 1], following)[here]
        if (
            rule != "block" and here.any()
        ):  # block: the first is accepted with the second
            check_counts(
                np.bincount(second, minlength=vocab), distribution[start], rule
            )


@pytest.mark.parametrize("kind", [GREEDY, STANDARD, COUPLED])
def test_without_drafts_it_is_plain_decoding(kind):
    one = with_kind(make_round(drafts=0), kind)
    _, token = run(one)
    active = make_active(
        len(token),
        num_tokens=START,
        temperature=one.temperature,
        top_k=one.top_k,
        top_p=one.top_p,
        min_p=one.min_p,
        rule=np.maximum(one.kind, 0),
        seed=one.seed,
    )
    plain = jax.jit(
        lambda logits, none, active: (
            verify(
                None, logits, none, active, Backend(), tree=Tree.chain(0), adjust=None
            ).next_token
        ),
        compiler_options=UNOPTIMISED,
    )
    none = jnp.zeros(len(token), jnp.int32)
    found = plain(jnp.asarray(one.logits[:, 0]), none, active)
    np.testing.assert_array_equal(token, found)


@pytest.mark.parametrize("kind", [GREEDY, COUPLED])
def test_speculation_does_not_change_the_text(kind):
    one = with_kind(make_round(seed=3), kind)
    accepted, following = run(one)
    bare = replace(
        one, tokens=one.tokens[:, :0], draft=one.draft[:, :0], logits=one.logits[:, :1]
    )
    numbers = one.numbers
    _, plain = run(
        replace(bare, num_draft_tokens=np.zeros_like(one.num_draft_tokens)),
        accept_uniform=numbers["accept_uniform"][:, :0],
        noise_words=numbers["noise_words"][:, :1],
    )
    np.testing.assert_array_equal(
        np.where(accepted > 0, one.tokens[:, 0], following), plain
    )
    assert len(set(accepted)) > 1


def test_bfloat16_logits_equal_their_float32_values():
    one = make_round(seed=2)
    small = jnp.asarray(one.logits, jnp.bfloat16)
    wide = replace(one, logits=np.asarray(small, np.float32))
    found = tiled()(
        *(small if i == 2 else array for i, array in enumerate(one.arrays)),
        **one.numbers,
    )
    np.testing.assert_array_equal(found, by_whole_rows(wide))


def test_row_does_not_depend_on_the_other_rows():
    """Other rows' parameters decide which passes run, but change no verdict."""
    one = with_kind(make_round(seed=4, is_filtered=False), STANDARD)
    others = make_round(seed=5)
    mine = np.arange(len(one.kind)) % 2 == 0

    def join(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return np.where(mine.reshape(-1, *[1] * (left.ndim - 1)), left, right)

    fields = {
        name: join(getattr(one, name), getattr(others, name)) for name in vars(one)
    }
    found, alone = run(Round(**fields)), run(one)
    np.testing.assert_array_equal(found[0][mine], alone[0][mine])
    np.testing.assert_array_equal(found[1][mine], alone[1][mine])


def test_verdict_under_jit_and_by_the_public_name():
    one = make_round(seed=1)
    found = by_public_name(*one.arrays, **one.numbers)
    np.testing.assert_array_equal(found, by_whole_rows(one))


def test_without_noise_a_coupled_sequence_keeps_the_distribution():
    one = make_round(seed=6)
    found = by_public_name(*one.arrays, **one.numbers | dict(noise_words=None))
    kind = np.where(one.kind == COUPLED, STANDARD, one.kind)
    np.testing.assert_array_equal(found, by_whole_rows(replace(one, kind=kind)))


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
        ("num_draft_tokens", (7,)),
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
    names = (
        "draft_tokens",
        "draft_probs",
        "target_logits",
        "num_draft_tokens",
        "sampling_values",
    )
    given: dict[str, Any] = dict(zip(names, one.arrays, strict=True)) | one.numbers
    if name in SamplingValues._fields:
        given["sampling_values"] = one.sampling_values._replace(
            **{name: jnp.zeros(shape)}
        )
    else:
        given[name] = jnp.zeros(shape, given[name].dtype)
    with pytest.raises(ValueError, match=re.escape(str(shape))) as raised:
        rejection_sampling(**given)
    # Other shapes are compared with that of the logits, so the error may name another
    # array if the logits are wrong.
    assert name == "target_logits" or str(raised.value).startswith(name)
