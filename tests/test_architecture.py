"""The engine's rounds equal `reference_round` in docs/architecture.md."""

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.program.plan import COUPLED
from jaxspec.sampling_params import SamplingParams
from tests.support import pair
from tests.support.engines import (
    OneProgramRunner,
    generate,
    make_draft_of,
    make_engine,
    make_micro,
)
from tests.support.oracles import hf_logits

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
NUM_DRAFT, LENGTH = 3, 14
PROMPTS = [[5, 6, 7], [9, 8, 3, 4]]


def shown_round() -> Any:
    """Return the function `reference_round` that the page defines."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names["reference_round"]


@pytest.mark.parametrize(
    ("rule", "temperature"),
    [
        pytest.param("standard", 0.0, marks=pytest.mark.slow),
        pytest.param("standard", 0.8, marks=pytest.mark.slow),
        ("coupled", 0.8),
    ],
)
def test_engine_runs_the_documented_round(rule: str, temperature: float):
    target = make_micro()
    draft = make_draft_of(target)
    engine = make_engine(
        target,
        draft,
        num_draft_tokens=NUM_DRAFT,
        rule=rule,
        runner=OneProgramRunner,
        max_num_seqs=1,
        max_num_batched_tokens=32,
    )
    params = SamplingParams(temperature=temperature, max_tokens=LENGTH, ignore_eos=True)
    reference, num_rounds = shown_round(), 0
    for prompt in PROMPTS:
        with pair.recorded(engine) as rounds:
            (output,) = generate(engine, [prompt], params)
        (admission,) = [one for plan, *_ in rounds for one in plan.admissions]
        assert (admission.rule == COUPLED) == (rule == "coupled")
        first = [
            result
            for plan, shape, result in rounds
            if plan.tiles and not shape.is_draft_prefill
        ]
        text = [*prompt, int(first[-1].tile_token[0])]
        for plan, _, result in rounds:
            if not plan.decode:
                continue
            added = reference(
                lambda tokens: hf_logits(target, np.array(tokens)),
                lambda tokens: hf_logits(draft, np.array(tokens)),
                text,
                int(result.num_valid_drafts[0]),
                jnp.array(admission.seed, jnp.uint32),
                temperature,
                rule == "coupled",
            )
            count = int(result.num_emitted[0])  # fewer drafts at the end of the text
            added, num_rounds = added[len(text) :][:count], num_rounds + 1
            assert result.tokens[0, :count].tolist() == added, num_rounds
            text += added
        assert text[len(prompt) :] == list(output.outputs[0].token_ids)
    assert num_rounds > 4
