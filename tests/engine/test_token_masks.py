"""Answers equal those of a matcher that reads every text from its beginning."""

from typing import Any

import numpy as np
import pytest

from jaxspec.engine.grammar import GrammarCompiler
from jaxspec.engine.token_masks import EVERYTHING, Reading, TokenMasks
from jaxspec.sampling_params import StructuredOutputsParams
from tests.engines import StubTokenizer

VOCAB, EOS, NUM_PROMPT, WINDOW, DRAFTS = 40, 1, 5, 18, 3
WORDS = 2
FORM = StructuredOutputsParams(regex=r"([%-*]{2,4}-)+[0-5]{0,6}")
COMPILER = GrammarCompiler(StubTokenizer(VOCAB), VOCAB, (EOS,))


def fresh_masks(text: list[int], drafts: list[int]) -> np.ndarray:
    """What the answer must be: one new matcher for every row."""
    masks = np.full((len(drafts) + 1, WORDS), EVERYTHING)
    for row in range(len(drafts) + 1):
        matcher = COMPILER.matcher(FORM)
        path = [token for token in [*text, *drafts[:row]] if token != EOS]
        if not matcher.consume_tokens(path):
            break
        if EOS in [*text, *drafts[:row]]:
            matcher.consume_token(EOS)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint32)
        masks[row] = bits[:WORDS]
        if row < len(drafts) and drafts[row] not in ids_of(masks[row]):
            break
    return masks


def ids_of(mask: np.ndarray) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]
    return np.flatnonzero(bits).tolist()


def ask(masks: TokenMasks, *rows: tuple[Any, list[int], list[int]]) -> np.ndarray:
    """Ask about (reading, text, drafts) of several sequences at once."""
    newest = np.zeros((len(rows), WINDOW), np.int32)
    for index, (_, text, _) in enumerate(rows):
        known = [7] * NUM_PROMPT + text
        newest[index, -len(known) :] = known[-WINDOW:]
    return masks(
        np.array([getattr(row[0], "grammar_id", row[0]) for row in rows], np.int32),
        np.array([NUM_PROMPT + len(row[1]) for row in rows], np.int32),
        newest,
        np.array([row[2] for row in rows], np.int32).reshape(len(rows), -1),
        np.arange(len(rows[0][2]) + 1),
    )


def make_reading(num_prompt: int = NUM_PROMPT, **changes: Any) -> Reading:
    return Reading(matcher=COMPILER.matcher(FORM), num_prompt=num_prompt, **changes)


def opened() -> tuple[TokenMasks, Reading]:
    masks, reading = TokenMasks(VOCAB), make_reading()
    masks.add(reading)
    return masks, reading


def drawn(text: list[int], count: int, random: np.random.Generator) -> list[int]:
    """Tokens that mostly go on with the text, now and then any."""
    tokens: list[int] = []
    for _ in range(count):
        choices = ids_of(fresh_masks([*text, *tokens], [])[0])
        if EOS in choices and len(choices) > 1 and random.random() < 0.7:
            choices.remove(EOS)
        is_any = random.random() < 0.15
        tokens.append(int(random.integers(4, VOCAB) if is_any else choices[0]))
        if not is_any:
            tokens[-1] = int(random.choice(choices))
        else:
            break
    rest = random.integers(4, VOCAB, count - len(tokens))
    return tokens + rest.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_rounds_of_a_text(seed):
    random = np.random.default_rng(seed)
    masks, reading = opened()
    text: list[int] = []
    while EOS not in text and len(text) < 60:
        drafts = drawn(text, DRAFTS, random)
        answer = ask(masks, (reading, text, drafts))
        np.testing.assert_array_equal(answer[0], fresh_masks(text, drafts))
        # Asked again, as a program that runs twice would: the same.
        np.testing.assert_array_equal(ask(masks, (reading, text, drafts)), answer)
        accepted = 0
        while accepted < DRAFTS and drafts[accepted] in ids_of(answer[0, accepted]):
            accepted += 1
        kept = drafts[: random.integers(0, accepted + 1)]
        choices = ids_of(fresh_masks([*text, *kept], [])[0])
        text += [*kept, int(random.choice(choices))]
        if EOS in text:
            text = text[: text.index(EOS) + 1]
        if random.random() < 0.2:  # a prompt's last tile asks without drafts
            answer = ask(masks, (reading, text, []))
            np.testing.assert_array_equal(answer[0], fresh_masks(text, []))


def test_after_the_end_only_the_end_is_allowed():
    masks, reading = opened()
    text = [4, 5, 12, EOS]  # "%&-"
    for end in ([EOS], [EOS, EOS, EOS]):
        answer = ask(masks, (reading, text + end, [EOS, EOS, 4]))[0]
        assert [ids_of(row) for row in answer[:3]] == [[EOS]] * 3
        assert (answer[3] == EVERYTHING).all()  # after a draft that cannot be


def test_a_text_taken_back_is_read_anew():
    masks, reading = opened()
    ask(masks, (reading, [4, 5, 12, 20], [20, 20, 20]))
    for text in ([4, 5, 6], [4, 5, 12], [], [7, 7, 12, EOS]):
        answer = ask(masks, (reading, text, [4, 4, 12]))
        np.testing.assert_array_equal(answer[0], fresh_masks(text, [4, 4, 12]))


def test_many_tokens_at_once_up_to_the_window():
    masks, reading = opened()
    text = [4, 5, 12] * 6
    answer = ask(masks, (reading, text, [4, 5, 12]))
    np.testing.assert_array_equal(answer[0], fresh_masks(text, [4, 5, 12]))
    masks, reading = opened()
    with pytest.raises(AssertionError, match="further ahead than it tells"):
        ask(masks, (reading, [*text, 4], [4, 5, 12]))


def test_rows_without_grammar_and_unknown_ids_allow_everything():
    masks, reading = opened()
    answer = ask(
        masks,
        (0, [9], [4, 4, 4]),
        (reading, [], [4, 5, 12]),
        (reading.grammar_id + 7, [9], [4, 4, 4]),
    )
    assert (answer[[0, 2]] == EVERYTHING).all()
    np.testing.assert_array_equal(answer[1], fresh_masks([], [4, 5, 12]))


def test_a_reading_is_known_as_long_as_somebody_holds_it():
    masks, reading = opened()
    grammar_id = reading.grammar_id
    masks.add(reading)
    assert reading.grammar_id == grammar_id and len(masks) == 1
    del reading
    assert len(masks) == 0
    assert (ask(masks, (grammar_id, [], [4, 5, 12])) == EVERYTHING).all()
    other = make_reading()
    masks.add(other)
    assert other.grammar_id != grammar_id
    assert masks.num_questions == 1


def test_the_draft_asks_for_one_row_at_a_time():
    masks, reading = opened()
    text, drafts = [4, 5], [12, 4, 5]
    expected = fresh_masks(text, drafts)
    newest = np.zeros((1, WINDOW), np.int32)
    newest[0, -2:] = text
    for before in range(DRAFTS):
        # What is not drawn yet is junk.
        asked = [drafts[:before] + [39] * (DRAFTS - before)]
        answer = masks(
            np.array([reading.grammar_id]),
            np.array([NUM_PROMPT + len(text)]),
            newest,
            np.array(asked),
            np.array([before]),
        )
        np.testing.assert_array_equal(answer[0, 0], expected[before])
    np.testing.assert_array_equal(ask(masks, (reading, text, drafts))[0], expected)


def test_what_the_draft_was_told_is_not_worked_out_again():
    masks, reading = opened()
    ask(masks, (reading, [4], [5, 12, 4]))
    told = dict(reading.told)
    assert sorted(map(len, told)) == [0, 1, 2, 3]
    ask(masks, (reading, [4], [5, 12, 4]))
    assert all(reading.told[path] is mask for path, mask in told.items())
    ask(masks, (reading, [4, 5], [12, 4, 4]))
    np.testing.assert_array_equal(
        ask(masks, (reading, [4, 5], [12, 4, 4]))[0], fresh_masks([4, 5], [12, 4, 4])
    )


def test_no_end_before_min_tokens_unless_the_text_is_complete():
    form = StructuredOutputsParams(regex="%&(%)?")
    masks = TokenMasks(VOCAB)
    asked = [
        Reading(
            matcher=COMPILER.matcher(form),
            num_prompt=NUM_PROMPT,
            min_tokens=min_tokens,
            stop_ids=(EOS, 35),
        )
        for min_tokens in (0, 3, 9)
    ]
    for reading in asked:
        masks.add(reading)
    answer = ask(masks, *((one, [4, 5], [4, EOS]) for one in asked))
    found = [[ids_of(row) for row in rows] for rows in answer]
    assert found[0] == [[EOS, 4], [EOS], [EOS]]
    assert found[1] == found[2] == [[4], [EOS], [EOS]]
