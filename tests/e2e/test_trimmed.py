"""Draft models with a trimmed vocabulary never propose a removed token.

Every text here contains removed tokens, at which rounds end. Properties of all
proposers are in `tests/conformance`.
"""

from typing import Any

import numpy as np
import pytest

from jaxspec import LLM
from jaxspec.engine import loader
from jaxspec.engine.model_folders import BUNDLED_DRAFT, BUNDLED_TARGET
from jaxspec.sampling_params import SamplingParams, StructuredOutputsParams
from jaxspec.sharding import DRAFT_MESH_AXES
from tests.conformance import claims, distribution, proposers
from tests.support import heads, pair
from tests.support.engines import (
    QuickGreedyRunner,
    generate,
    load_weights,
    tokens_of,
    with_params,
    with_settings,
)
from tests.support.oracles import hf_logits
from tests.support.pair import KEPT
from tests.support.stub_tokenizer import FIRST_CHARACTER


def params_of(count: int, **changes: Any) -> list[SamplingParams]:
    """Return requests that are seeded and greedy in turn."""
    both: dict[str, Any] = dict(max_tokens=claims.LENGTH, ignore_eos=True) | changes
    return [
        SamplingParams(temperature=0.9, seed=index, **both)
        if index % 2
        else SamplingParams(temperature=0, **both)
        for index in range(count)
    ]


def test_drafts_are_the_best_of_the_kept_tokens():
    """HuggingFace's draft model computes the expected drafts."""
    engine = with_settings(proposers.forced_engine("trimmed"))
    drafted, others = set[int](), set[int]()
    for prompt in claims.prompts()[:4]:
        _, rounds = heads.forced_rounds(engine, prompt, claims.GREEDY)
        for known, drafts in rounds:
            others |= {known[-1]} - set(KEPT)
            logits = hf_logits(pair.draft("noisy"), np.array(known + drafts[:-1]))
            logits[:, np.setdiff1d(np.arange(64), KEPT)] = -np.inf
            for row, token in zip(logits[len(known) - 1 :], drafts, strict=False):
                assert row[token] > row.max() - 1e-4
                drafted.add(token)
    assert len(drafted) > len(KEPT) // 2
    assert others, "no round ends with a removed token"


@pytest.mark.slow
def test_target_as_its_own_draft_is_accepted_for_kept_tokens():
    """If a text contains only kept tokens, every draft is accepted."""
    plain = with_settings(pair.plain_engine())
    whole = tokens_of(generate(plain, claims.prompts(), claims.GREEDY))
    some, texts, said = [], [], set[int]()
    for prompt, text in zip(claims.prompts(), whole, strict=True):
        if len(said | set(text)) <= len(KEPT):
            some.append(prompt)
            texts.append(text)
            said |= set(text)
    others = [token for token in range(64) if token not in said]
    kept = sorted([*said, *others[: len(KEPT) - len(said)]])
    first = proposers.first_engine("trimmed")
    params = load_weights(
        pair.draft("same"),
        first.runner.dtype,
        first.runner.mesh,
        DRAFT_MESH_AXES,
        token_ids=kept,
    )
    engine = with_params(first, params)
    assert tokens_of(generate(engine, some, claims.GREEDY)) == texts
    assert engine.stats.num_draft_tokens > 40
    assert engine.stats.acceptance_rate == 1.0


def characters(ids: list[int]) -> str:
    escaped = (f"\\x{FIRST_CHARACTER + token:02x}" for token in ids)
    return f"[{''.join(escaped)}]"


CUT = [token for token in range(4, 64) if token not in KEPT]


@pytest.mark.parametrize(
    "asked",
    [
        # The draft model has none of the tokens allowed at the first position, or at
        # any.
        dict(
            structured_outputs=StructuredOutputsParams(
                regex=f"{characters(CUT[:6])}{characters(KEPT[2:])}{{4,40}}"
            )
        ),
        pytest.param(
            dict(
                structured_outputs=StructuredOutputsParams(
                    regex=f"{characters(CUT[:9])}{{12}}"
                )
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(dict(allowed_token_ids=CUT), marks=pytest.mark.slow),
        pytest.param(
            dict(presence_penalty=0.5, repetition_penalty=1.3, min_p=0.02),
            marks=pytest.mark.slow,
        ),
        pytest.param(dict(logit_bias={CUT[3]: 50.0}), marks=pytest.mark.slow),
        pytest.param(dict(top_k=3, logprobs=2), marks=pytest.mark.slow),
    ],
    ids=["first", "none", "allowed", "penalties", "bias", "top-k"],
)
def test_controls_have_effect_if_the_draft_lacks_allowed_tokens(asked):
    engine = proposers.engine("trimmed")
    params = params_of(len(claims.prompts()), **(dict(ignore_eos=False) | asked))
    found = generate(engine, claims.prompts(), params)
    assert engine.stats.num_draft_tokens > 20
    engine.scheduler.check_idle()
    # The same program without drafts: that of another engine takes long to compile.
    for one in params:
        one.extra_args = {"num_speculative_tokens": 0}
    plain = proposers.engine("trimmed")
    assert tokens_of(found) == tokens_of(generate(plain, claims.prompts(), params))
    assert plain.stats.num_draft_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["standard", "block", "seeded", "greedy"])
def test_trimming_lowers_acceptance_but_not_to_zero(rule):
    engine = proposers.micro_engine("trimmed")
    assert 0.1 < distribution.acceptance_of(engine, rule) < 0.9


@pytest.mark.slow
def test_trimmed_head_is_restored_after_sleep():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "Runner", QuickGreedyRunner)
        config = {"model": BUNDLED_DRAFT, "draft_vocab_size": 2048}
        llm = LLM(
            BUNDLED_TARGET,
            dtype="float32",
            max_model_len=64,
            max_num_seqs=1,
            max_num_batched_tokens=32,
            speculative_config=config | {"num_speculative_tokens": 2},
        )
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found = []
    for level in (None, 1, 2):
        if level is not None:
            llm.sleep(level=level)
            llm.wake_up()
        (output,) = llm.generate(["The quick brown fox"], params, use_tqdm=False)
        counts = llm.llm_engine.stats
        found.append((output.outputs[0].token_ids, counts.num_accepted_tokens))
    assert found[0][0] == found[1][0] == found[2][0]
    first = found[0][1]
    assert [accepted for _, accepted in found] == [first, 2 * first, 3 * first]
