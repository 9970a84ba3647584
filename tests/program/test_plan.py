"""A plan's vector transports every control value, and padding is neutral."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.program.plan import (
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_CONTROLLED,
    MAX_LOGPROB_TOKEN_IDS,
    NO_TOKEN,
    TILE,
    Features,
    StepPlan,
    StepShape,
    TokenControls,
)
from jaxspec.program.wire import PlanLayout
from tests.support.plans import ADMISSION, POOL, with_controls

SHAPE = StepShape(
    num_seqs=4,
    num_draft_tokens=3,
    max_prompt_tokens=8 * TILE,
    features=Features(has_controls=True),
)
LAYOUT = PlanLayout(SHAPE, POOL)
CONTROLS = TokenControls(
    presence_penalty=-0.5,
    frequency_penalty=1.25,
    repetition_penalty=1.1,
    bias=((5, -100.0), (69, 2.5)),
    allowed=(0, 31, 32, 69),
    bad_words=((7,), (1, 2, 3)),
    logprob_token_ids=(69, 0, 69),
)


def fields_of(plan: StepPlan) -> dict[str, np.ndarray]:
    fields = LAYOUT.read(jnp.asarray(LAYOUT.pack(plan)))
    return {name: np.asarray(values) for name, values in fields.items()}


def test_every_control_value_arrives():
    plan = StepPlan(admissions=[ADMISSION, with_controls(1, CONTROLS)])
    fields = fields_of(plan)
    # Entries are in the order of admissions, and only requests with controls have one.
    pads = [POOL.num_rows] * (MAX_CONTROLLED - 1)
    assert fields["control_row"].tolist() == [1, *pads]
    penalties = fields["control_penalties"][0]
    np.testing.assert_array_equal(penalties, np.array([-0.5, 1.25, 1.1], np.float32))
    ids = fields["control_bias_ids"][0]
    assert ids.tolist() == [5, 69] + [NO_TOKEN] * (MAX_BIAS - 2)
    values = fields["control_bias_values"][0]
    assert values[:2].tolist() == [-100.0, 2.5]
    # The masks of 70 tokens take three words.
    allowed = fields["control_allowed"][0].tolist()
    assert allowed == [2**31 + 1, 1, 2**5]
    words = fields["control_bad_words"][0]
    assert words[:2, -3:].tolist() == [[NO_TOKEN, NO_TOKEN, 7], [1, 2, 3]]
    assert (words[:2, :-3] == NO_TOKEN).all()
    assert (words[2:] == NO_TOKEN).all()
    ids = fields["control_logprob_token_ids"][0].tolist()
    assert ids == [69, 0, 69] + [NO_TOKEN] * (MAX_LOGPROB_TOKEN_IDS - 3)


def test_default_controls_allow_everything():
    fields = fields_of(StepPlan(admissions=[with_controls(2, TokenControls())]))
    assert fields["control_row"][0] == 2
    penalties = fields["control_penalties"][0]
    assert penalties.tolist() == [0, 0, 1]
    assert (fields["control_bias_ids"][0] == NO_TOKEN).all()
    assert (fields["control_bad_words"][0] == NO_TOKEN).all()
    bits = np.unpackbits(fields["control_allowed"][0].view(np.uint8), bitorder="little")
    assert bits[: POOL.vocab_size].all()


def test_plans_without_controls_have_no_control_fields():
    without = StepShape(num_seqs=4, num_draft_tokens=3, max_prompt_tokens=TILE)
    decoding = dataclasses.replace(
        without, max_prompt_tokens=0, features=SHAPE.features
    )
    for shape in (without, decoding):
        layout = PlanLayout(shape, POOL)
        assert not [name for name in layout.fields if name.startswith("control")]
    with pytest.raises(AssertionError, match="controlled"):
        plan = StepPlan(admissions=[with_controls(1, CONTROLS)])
        PlanLayout(without, POOL).pack(plan)


@pytest.mark.parametrize(
    "controls",
    [
        TokenControls(bias=tuple((0, 1.0) for _ in range(MAX_BIAS + 1))),
        TokenControls(bad_words=((1,),) * (MAX_BAD_WORDS + 1)),
        TokenControls(bad_words=((1,) * 9,)),
        TokenControls(bad_words=((),)),
        TokenControls(logprob_token_ids=(1,) * (MAX_LOGPROB_TOKEN_IDS + 1)),
    ],
    ids=["bias", "bad words", "long word", "empty word", "logprob ids"],
)
def test_too_large_controls_fail_an_assertion(controls: TokenControls):
    with pytest.raises(AssertionError):
        LAYOUT.pack(StepPlan(admissions=[with_controls(1, controls)]))
