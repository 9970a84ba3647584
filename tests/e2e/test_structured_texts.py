"""The bundled pair writes JSON, choices and more, with drafts and without, alike."""

import json
import re
from typing import Any

import pytest

import jaxspec.engine.loader
from jaxspec.llm import LLM
from jaxspec.outputs import RequestOutput
from jaxspec.sampling_params import SamplingParams, StructuredOutputsParams
from tests.engines import QuickRunner

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
# The fifth has no form.
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("temperature", "draft"),
    [(0.0, DRAFT), (0.8, DRAFT), (0.8, TARGET)],
    ids=["greedy", "seeded", "the target drafts"],
)
def test_every_text_fits_its_form_and_drafts_change_nothing(
    temperature, draft, monkeypatch
):
    # Every shape is tested elsewhere; here most of the time would go to compiling them.
    monkeypatch.setattr(jaxspec.engine.loader, "Runner", QuickRunner)
    plain = write(temperature)
    drafted = write(
        temperature,
        speculative_model=draft,
        num_speculative_tokens=4,
    )
    for one, other in zip(plain, drafted, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    # The draft keeps to the forms as well: else little of what it proposes would stay.
    metrics = [output.outputs[0].spec_decode_metrics for output in drafted[::5]]
    accepted = sum(one.num_accepted_draft_tokens for one in metrics if one)
    proposed = sum(one.num_draft_tokens for one in metrics if one)
    assert accepted > (0.3 if draft == DRAFT else 0.9) * proposed
    if draft == TARGET:
        # All of it does, but for what comes after the end of a text.
        assert all(sum(one.histogram[:-1]) <= 1 for one in metrics if one)
