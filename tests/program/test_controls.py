"""Penalties, bias and masks equal the results of a float64 loop over rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.backend import Backend
from jaxspec.program import controls
from jaxspec.program.plan import MAX_BAD_WORD_LEN, NO_TOKEN, TokenControls
from jaxspec.program.rows import Active
from jaxspec.sharding import TARGET_MESH_AXES, make_mesh
from tests.support.distributions import controlled
from tests.support.rows import make_active, make_control_rows

SEQS, DRAFTS, VOCAB, PAGE, PAGES = 24, 3, 72, 4, 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """Sequences with known tokens, drafts and controls, and a launch's arrays."""

    asked: list[TokenControls | None]
    tokens: list[list[int]]
    num_prompt: np.ndarray
    drafts: np.ndarray
    logits: np.ndarray
    active: Active
    token_pages: jax.Array

    def expected(self) -> np.ndarray:
        made = np.array(self.logits, np.float64)
        for seq, row in np.ndindex(made.shape[:2]):
            one = self.asked[seq]
            if one is not None:
                known = self.tokens[seq] + self.drafts[seq, :row].tolist()
                num_prompt = int(self.num_prompt[seq])
                made[seq, row] = controlled(made[seq, row], known, num_prompt, one)
        return made

    def adjusted(self, backend: Backend, rows: slice = slice(None)) -> np.ndarray:
        def run(asked, token_pages, active, logits, drafts):
            adjust = controls.adjuster(
                asked, token_pages, active, vocab_size=VOCAB, backend=backend
            )
            return adjust(logits, drafts, num_before=rows.start or 0)

        drafts = jnp.asarray(self.drafts, jnp.int32)
        logits = jnp.asarray(self.logits[:, rows])
        asked = make_control_rows(self.asked, VOCAB)
        found = jax.jit(run)(asked, self.token_pages, self.active, logits, drafts)
        return np.asarray(found)


def make_round(asked: list[TokenControls | None], *, few_tokens: int = 6) -> Round:
    """Make sequences in which few tokens repeat in prompt, output and drafts."""
    random = np.random.default_rng(3)
    count = len(asked)
    lengths = random.integers(8, PAGE * PAGES + 1, count)
    num_prompt = random.integers(1, 8, count)
    pages = random.integers(0, VOCAB, (count * PAGES, PAGE))
    table = random.permutation(count * PAGES).reshape(count, PAGES)
    some = random.permutation(VOCAB)[:few_tokens]
    tokens = random.choice(some, (count, PAGE * PAGES))
    pages[table] = tokens.reshape(count, PAGES, PAGE)
    # Slots past the end hold tokens that do not occur in the texts.
    table = np.where(np.arange(PAGES) * PAGE < lengths[:, None], table, count * PAGES)
    active = dataclasses.replace(
        make_active(count, num_tokens=lengths, num_prompt=num_prompt),
        page_table=jnp.asarray(table, jnp.int32),
    )
    return Round(
        asked=asked,
        tokens=[row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)],
        num_prompt=num_prompt,
        drafts=random.choice(some, (count, DRAFTS)),
        logits=random.normal(size=(count, DRAFTS + 1, VOCAB)).astype(np.float32) * 3,
        active=active,
        token_pages=jnp.asarray(pages, jnp.int32),
    )


def random_controls(seed: int) -> TokenControls | None:
    random = np.random.default_rng(seed)
    if seed % 6 == 5:
        return None
    biased = random.permutation(VOCAB)[:7].tolist()
    return TokenControls(
        presence_penalty=random.uniform(-2, 2),
        frequency_penalty=random.uniform(-2, 2),
        repetition_penalty=random.uniform(0.5, 2),
        bias=tuple((token, random.normal() * 5) for token in biased),
        allowed=None if seed % 3 else tuple(random.permutation(VOCAB)[:50].tolist()),
    )


def with_bad_words(made: Round) -> Round:
    """Add bad words that end at rows; some differ by a token or are a position off."""
    asked = []
    for seq, one in enumerate(made.asked):
        if one is None:
            asked.append(None)
            continue
        random = np.random.default_rng(seq)
        words = [(int(random.integers(VOCAB)),)]
        known = made.tokens[seq] + made.drafts[seq].tolist()
        for row in range(DRAFTS + 1):
            end = len(made.tokens[seq]) + row
            for length in (1, 2, 3, MAX_BAD_WORD_LEN - 1):
                last = int(random.integers(VOCAB))
                start = known[max(end - length, 0) : end]
                words += [(*start, last)]
                other = [*start[:-1], (start[-1] + 1) % VOCAB]
                words += [(*other, int(random.integers(VOCAB)))]
        asked.append(dataclasses.replace(one, bad_words=tuple(words)))
    return dataclasses.replace(made, asked=asked)


def mixed_round() -> Round:
    return with_bad_words(make_round([random_controls(i) for i in range(SEQS)]))


def split(shards: int) -> Backend:
    return Backend(mesh=make_mesh(shards), mesh_axes=TARGET_MESH_AXES)


def check_adjust() -> None:
    made = mixed_round()
    expected = made.expected()
    found = made.adjusted(Backend())
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)
    assert (expected[1] == -np.inf).any(), "no bad word of a row without a mask"
    untouched = [seq for seq, one in enumerate(made.asked) if one is None]
    np.testing.assert_array_equal(found[untouched], made.logits[untouched])


def test_every_row_counts_the_tokens_before_it():
    check_adjust()


def test_default_controls_change_nothing():
    made = make_round([TokenControls()] * 4)
    np.testing.assert_array_equal(made.adjusted(Backend()), made.logits)


@pytest.mark.parametrize("shards", [1, 8])
def test_bad_words_do_not_mask_the_last_allowed_tokens(shards):
    allowed, row = [5, 40], 1
    words = TokenControls(bad_words=((5,), (40,)))
    made = make_round([dataclasses.replace(words, allowed=(5, 40)), words])
    found = made.adjusted(split(shards))
    assert set(np.flatnonzero(found[0, row] > -np.inf)) == set(allowed)
    np.testing.assert_array_equal(found[0, row, allowed], made.logits[0, row, allowed])
    assert set(np.flatnonzero(found[1, row] == -np.inf)) == set(allowed)


@pytest.mark.parametrize("shards", [1, 8])
def test_bad_words_do_not_leave_only_an_early_stop_id(shards):
    """The only allowed tokens of a row are a bad word and a stop id.

    Before `min_tokens` both would be forbidden. A row needs a token, so then neither
    is; later the stop id remains.
    """
    stop, word, early = 40, 5, 2
    asked = TokenControls(allowed=(stop, word), bad_words=((word,),))
    made = make_round([asked] * 2)
    active = dataclasses.replace(
        made.active,
        stop_ids=jnp.array([[NO_TOKEN, stop]] * 2, jnp.int32),
        min_total=made.active.num_tokens + jnp.array([early, 0], jnp.int32),
    )
    made = dataclasses.replace(made, active=active)
    found = made.adjusted(split(shards))
    for seq, num_early in enumerate((early, 0)):
        for row in range(DRAFTS + 1):
            left = {stop, word} if row < num_early else {stop}
            assert set(np.flatnonzero(found[seq, row] > -np.inf)) == left


@pytest.mark.parametrize("shards", [2, 8])
def test_split_vocabulary_equals_one_device(shards):
    made = mixed_round()
    assert split(shards).vocab_axes(VOCAB) is not None
    np.testing.assert_array_equal(
        made.adjusted(split(shards)), made.adjusted(Backend())
    )


def test_single_rows_equal_rows_of_the_round():
    """A row computed alone, as for a draft model, counts the drafts before it."""
    made = mixed_round()
    together = made.adjusted(Backend())
    for row in range(DRAFTS + 1):
        alone = made.adjusted(Backend(), slice(row, row + 1))
        np.testing.assert_array_equal(alone[:, 0], together[:, row])
