"""Plans hold a limited number of values, and controls only where shapes have them."""

import dataclasses

import pytest

from jaxspec.program.plan import (
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    TILE,
    Features,
    PoolShape,
    StepPlan,
    StepShape,
    TokenControls,
)
from jaxspec.program.wire import PlanLayout
from tests.support.plans import POOL, with_controls

SHAPE = StepShape(num_seqs=4, num_levels=3, max_prompt_tokens=8 * TILE)
CONTROLLED = dataclasses.replace(SHAPE, features=Features(has_controls=True))


def test_plans_without_controls_have_no_control_fields():
    decoding = dataclasses.replace(CONTROLLED, max_prompt_tokens=0)
    for shape in (SHAPE, decoding):
        layout = PlanLayout(shape, POOL)
        assert not [name for name in layout.fields if name.startswith("control")]
    plan = StepPlan(admissions=[with_controls(1, TokenControls())])
    with pytest.raises(AssertionError, match="controlled"):
        PlanLayout(SHAPE, POOL).pack(plan)


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
    plan = StepPlan(admissions=[with_controls(1, controls)])
    with pytest.raises(AssertionError):
        PlanLayout(CONTROLLED, POOL).pack(plan)


@pytest.mark.parametrize(("length", "pages"), [(48, 12), (49, 13), (1, 1)])
def test_the_page_table_holds_the_longest_sequence(length, pages):
    pool = PoolShape(
        num_rows=1, num_pages=99, page_size=4, max_model_len=length, vocab_size=16
    )
    assert pool.table_len == pages
