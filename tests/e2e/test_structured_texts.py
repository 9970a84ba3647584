"""Structured outputs of the bundled pair are the same with and without drafts."""

import json
import re
from typing import Any

import pytest

import jaxspec.engine.loader
from jaxspec.llm import LLM
from jaxspec.outputs import RequestOutput
from jaxspec.sampling_params import SamplingParams, StructuredOutputsParams
from tests.support.engines import QuickRunner

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "é"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TARGET, DRAFT = "jaxspec/tiny-gemma2", "jaxspec/tiny-gemma2-draft"
NAMES = r"[A-Z][a-z]{2,8}( [A-Z][a-z]{2,8}){1,3}\."
ITEM = r"([a-z]{1,6}|[0-9]{1,3})"
GRAMMAR = f'start: "(" item ("," item){{0,3}} ")"\nitem: /{ITEM}/'
# The fifth request has no structured output.
FORMS = [
    StructuredOutputsParams(json=SCHEMA),
    StructuredOutputsParams(regex=NAMES),
    StructuredOutputsParams(choice=["yes", "no", "perhaps not"]),
    StructuredOutputsParams(grammar=GRAMMAR),
    None,
]
STARTS = [
    "Once upon a time",
    "The capital of France is",
    "Write a person as JSON:",
    "def main():",
    "Who are you?",
    "A list of animals:",
]
# Each case is (grammar, temperature, number of texts). All are close to the library's
# limits: many expressions; dead ends, which end texts with an error; many consecutive
# items.
NEAR_LIMITS = {
    "expressions": (StructuredOutputsParams(regex=r"(\w{1,20} ?){1,200}"), 1.3, 24),
    "expressions of JSON": (
        StructuredOutputsParams(
            json={
                "type": "object",
                "properties": {
                    "a": {"type": "string", "pattern": r"^(\w{1,20} ?){3,100}$"}
                },
                "required": ["a"],
                "additionalProperties": False,
            }
        ),
        1.2,
        9,
    ),
    "dead ends": (
        StructuredOutputsParams(
            json={
                "type": "object",
                "properties": {
                    "score": {"type": "integer", "multipleOf": 5},
                    "tags": {
                        "type": "array",
                        "items": {"type": "string", "minLength": 3, "maxLength": 6},
                        "maxItems": 2,
                    },
                },
                "required": ["score", "tags"],
                "additionalProperties": False,
                "patternProperties": {"^score$": {"type": "integer"}},
            }
        ),
        1.2,
        16,
    ),
    "labels": (
        StructuredOutputsParams(choice=[f"label number {i}" for i in range(20_000)]),
        1.0,
        2,
    ),
    "items": (
        StructuredOutputsParams(
            json={
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {"kind": {"const": f"k{i}"}},
                        "required": ["kind"],
                        "additionalProperties": False,
                    }
                    for i in range(2500)
                ]
            }
        ),
        1.0,
        2,
    ),
}
PROMPTS = [f"{start} {number}" for number in range(10) for start in STARTS]


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        value.keys() == {"name", "age", "tags"}
        and len(value["name"]) <= 12
        and 0 <= value["age"] <= 150
        and len(value["tags"]) <= 3
        and set(value["tags"]) <= {"a", "bc", "é"}
    )


def fits(index: int, text: str) -> bool:
    kind = index % len(FORMS)
    if kind == 0:
        return is_person(text)
    pattern = {1: NAMES, 2: "yes|no|perhaps not", 3: rf"\({ITEM}(,{ITEM}){{0,3}}\)"}
    return kind == 4 or re.fullmatch(pattern[kind], text) is not None


def write(temperature: float, **draft: Any) -> list[RequestOutput]:
    llm = LLM(
        TARGET,
        max_model_len=256,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        dtype="float32",
        **draft,
    )
    params = [
        SamplingParams(
            temperature=temperature,
            max_tokens=128,
            seed=index if temperature else None,
            structured_outputs=FORMS[index % len(FORMS)],
        )
        for index in range(len(PROMPTS))
    ]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    wrong = [
        output.outputs[0].text
        for index, output in enumerate(outputs)
        if not fits(index, output.outputs[0].text)
    ]
    assert not wrong
    return outputs


@pytest.mark.long_suite(name="grammars")
@pytest.mark.parametrize(
    ("temperature", "draft"),
    [(0.0, DRAFT), (0.8, DRAFT), (0.8, TARGET)],
    ids=["greedy", "seeded", "the target drafts"],
)
def test_every_text_matches_its_grammar_and_drafts_change_nothing(
    temperature, draft, monkeypatch
):
    # All cases share one program shape, because others would take long to compile.
    monkeypatch.setattr(jaxspec.engine.loader, "Runner", QuickRunner)
    plain = write(temperature)
    drafted = write(
        temperature,
        speculative_model=draft,
        num_speculative_tokens=4,
    )
    for one, other in zip(plain, drafted, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    # If the draft model did not follow the grammars, few drafts would be accepted.
    metrics = [output.outputs[0].spec_decode_metrics for output in drafted[::5]]
    accepted = sum(one.num_accepted_draft_tokens for one in metrics if one)
    proposed = sum(one.num_draft_tokens for one in metrics if one)
    assert accepted > (0.3 if draft == DRAFT else 0.9) * proposed
    if draft == TARGET:
        # All drafts are accepted, except those past the end of a text.
        assert all(sum(one.histogram[:-1]) <= 1 for one in metrics if one)


@pytest.mark.long_suite(name="grammars")
def test_texts_of_grammars_close_to_the_librarys_limits_are_equal(monkeypatch):
    monkeypatch.setattr(jaxspec.engine.loader, "Runner", QuickRunner)
    names = [name for name, (_, _, count) in NEAR_LIMITS.items() for _ in range(count)]
    params = [
        SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=60 if name == "expressions" else 120,
            structured_outputs=form,
        )
        for name, (form, temperature, count) in NEAR_LIMITS.items()
        for seed in range(count)
    ]
    prompts = ["Once upon a time"] * len(params)
    found = []
    for draft in ({}, dict(speculative_model=DRAFT, num_speculative_tokens=5)):
        settings: dict[str, Any] = draft
        llm = LLM(
            TARGET, max_model_len=192, max_num_seqs=4, dtype="float32", **settings
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([output.outputs[0] for output in outputs])
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        assert one.finish_reason == other.finish_reason
        assert one.stop_reason == other.stop_reason
    for name, one in zip(names, found[0], strict=True):
        if name != "dead ends":
            assert one.finish_reason in ("stop", "length"), (name, one.stop_reason)
        if one.finish_reason != "stop":
            assert one.finish_reason == "length" or "dead end" in str(one.stop_reason)
        elif name == "labels":
            assert re.fullmatch(r"label number \d{1,5}", one.text)
        elif name != "expressions":
            json.loads(one.text)
    reasons = [one.finish_reason for one in found[0]]
    assert "error" in reasons and reasons.count("stop") > 10
