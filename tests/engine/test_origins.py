"""Who drew each token, and the text that each brought.

Over a device of plain Python that accepts what it likes, so that every cut into steps
comes up; the last test asks the real program.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.origins import OriginStream
from jaxspec.engine.output import TextStream
from jaxspec.outputs import CompletionOutput
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from tests.e2e import pair
from tests.engine.test_llm_engine import (
    EOS,
    PROMPT,
    TEXT,
    letters,
    make_fake_engine,
    run_all,
    run_one,
    said,
)
from tests.engine.test_output import EXAMPLES, IDS, TOKENIZER, byte_tokens, split
from tests.engines import generate

KINDS = list(RequestOutputKind)
WANTED = {"return_token_origins": True}


def wanting(**given: Any) -> SamplingParams:
    return SamplingParams(extra_args=WANTED | given.pop("extra_args", {}), **given)


def check(part: CompletionOutput) -> list[str]:
    """A part's origins, which must be of its tokens and of its text."""
    told = part.token_origins
    assert told is not None
    assert [one.token_id for one in told] == list(part.token_ids)
    assert "".join(one.text for one in told) == part.text
    return [one.origin for one in told]


def histogram_of(origins: list[str], num_draft: int) -> list[int]:
    """Count the steps by what they kept, from nothing but the origins."""
    counts, kept = [0] * (num_draft + 1), 0
    for origin in origins:
        if origin in ("recovered", "bonus"):
            counts[kept] += 1
        kept = kept + 1 if origin == "draft" else 0
    counts[kept] += kept > 0  # an accepted draft ended the text
    return counts


def agree(completion: CompletionOutput) -> list[str]:
    origins, counts = check(completion), completion.spec_decode_metrics
    assert counts is not None
    expected = histogram_of(origins, len(counts.histogram) - 1)
    assert counts.histogram == expected
    return origins


@pytest.mark.parametrize("num_draft", [1, 3, 5])
def test_origins_are_those_that_the_counts_tell_of(num_draft: int):
    seen: set[str] = set()
    for seed in range(8):
        for end in (TEXT, [*TEXT[:9], EOS, *TEXT[10:]]):
            engine, _ = make_fake_engine(end, seed=seed, num_draft_tokens=num_draft)
            origins = agree(run_one(engine, wanting(max_tokens=30)))
            assert origins[0] == "target", "the prompt's own token has no drafts"
            seen.update(origins)
    assert seen == {"draft", "recovered", "bonus", "target"}


def test_all_drafts_accepted_and_none():
    for accepts, expected in (
        (lambda low, high: high - 1, (["draft"] * 3 + ["bonus"]) * 2),
        # For the last token alone nothing is drafted.
        (lambda low, high: low, ["recovered"] * 7 + ["target"]),
    ):
        engine, runner = make_fake_engine(num_draft_tokens=3)
        device: Any = runner.device
        device._random = SimpleNamespace(integers=accepts)
        origins = agree(run_one(engine, wanting(max_tokens=9)))
        assert origins == ["target", *expected]


def test_without_drafts_all_is_the_targets():
    for engine_drafts, own in ((0, {}), (3, {"num_speculative_tokens": 0})):
        engine, _ = make_fake_engine(num_draft_tokens=engine_drafts)
        completion = run_one(engine, wanting(max_tokens=12, extra_args=own))
        assert check(completion) == ["target"] * 12
        assert completion.text == letters(said(12))


def test_nobody_else_is_told():
    engine, _ = make_fake_engine()
    assert run_one(engine, SamplingParams(max_tokens=5)).token_origins is None


def ask_all_kinds(engine: LLMEngine, **given: Any) -> dict[str, list[list[str]]]:
    """By kind and text: the origins, which every part must tell in step."""
    for kind in KINDS:
        engine.add_request(kind.name, PROMPT, wanting(output_kind=kind, **given))
    told = {}
    for name, outputs in run_all(engine).items():
        texts: list[list[str]] = [[] for _ in range(given.get("n", 1))]
        for output in outputs:
            for part in output.outputs:
                origins = check(part)
                if name == "DELTA":
                    origins = texts[part.index] + origins
                texts[part.index] = origins
        told[name] = texts
    return told


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_in_every_kind_of_output(include: bool):
    # The stop string begins twice before it comes true: text is held back.
    text = [2, 2, 2, 5, 6, 7, 5, 6, 7, 5, 6, 9]
    for seed in range(12):
        engine, _ = make_fake_engine(text, seed=seed, num_draft_tokens=5)
        told = ask_all_kinds(
            engine,
            max_tokens=30,
            stop=letters([5, 6, 7, 5, 6, 9]),
            include_stop_str_in_output=include,
        )
        assert all(len(origins) == 9 for (origins,) in told.values())


def test_several_texts_of_one_prompt():
    for seed in range(4):
        engine, _ = make_fake_engine(seed=seed, num_draft_tokens=3)
        told = ask_all_kinds(engine, max_tokens=13, n=3, temperature=0.5)
        assert all(len(origins) == 13 for texts in told.values() for origins in texts)


def test_a_request_that_is_preempted_and_computed_again():
    engine, _ = make_fake_engine(num_draft_tokens=5, num_pages=30, max_model_len=80)
    for number in range(3):
        engine.add_request(str(number), PROMPT, wanting(max_tokens=60))
    for outputs in run_all(engine).values():
        origins = agree(outputs[-1].outputs[0])
        assert len(origins) == 60
    assert engine.stats.num_preemptions > 0


@given(ids=IDS, data=st.data())
@EXAMPLES
def test_texts_of_real_pieces_join(ids: list[int], data: Any):
    """Bytes of a character, special tokens, stops; parts of any length."""
    whole = TOKENIZER.decode(ids)
    stops = []
    if whole and data.draw(st.booleans()):
        start = data.draw(st.integers(0, len(whole) - 1))
        stops.append(whole[start : start + data.draw(st.integers(1, 9))])
    params = SamplingParams(stop=stops)
    stream, origins = TextStream(TOKENIZER, params, has_ends=True), OriginStream()
    known: list[int] = []
    told, first, start = [], 0, 0
    rounds = split(ids, data.draw(st.lists(st.integers(1, 7))))
    rounds = [part for part in rounds if part] or [[]]  # a step brings a token at least
    for index, part in enumerate(rounds):
        matched = stream.push(part)
        is_end = matched is not None or index == len(rounds) - 1
        known += part if matched is None else part[: matched[1]]
        origins.push(len(part), 0, 0)
        origins.keep(len(known))
        if is_end and matched is None:
            stream.finish()
        text = stream.visible(is_finished=is_end)[start:]
        assert stream.ends is not None
        if known[first:] or is_end:
            new = origins.tell(known, stream.ends, first=first, start=start, text=text)
            assert "".join(one.text for one in new) == text
            told += new
            first, start = len(known), start + len(text)
        if is_end:
            break
    assert [one.token_id for one in told] == known
    assert "".join(one.text for one in told) == stream.text


def test_a_character_comes_with_its_last_byte():
    stream, origins = (
        TextStream(TOKENIZER, SamplingParams(), has_ends=True),
        OriginStream(),
    )
    ids = byte_tokens("a🦉".encode())
    stream.push(ids)
    origins.push(5, 5, 5)
    assert stream.ends is not None
    told = origins.tell(ids, stream.ends, first=0, start=0, text=stream.text)
    assert [one.text for one in told] == ["a", "", "", "", "🦉"]


def test_a_draft_that_is_the_target_is_never_recovered():
    engine = pair.engine("same")
    for temperature in (0.0, 1.0):
        params = wanting(max_tokens=21, temperature=temperature, ignore_eos=True)
        for output in generate(engine, [[5, 6, 7], [8, 9]], [params] * 2):
            origins = agree(output.outputs[0])
            assert origins == ["target"] + (["draft"] * 3 + ["bonus"]) * 5
