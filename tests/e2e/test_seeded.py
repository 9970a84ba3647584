"""The text of a seeded request does not depend on other requests or on scheduling.

`tests/conformance` checks that proposers and draft lengths do not change it.
"""

from typing import Any

import pytest

from jaxspec.sampling_params import SamplingParams
from tests.conformance import proposers
from tests.conformance.claims import CONTROLS
from tests.support import pair
from tests.support.engines import generate, make_engine, tokens_of, with_settings
from tests.support.rounds import constant_times


def seeded(number: int, **changes: Any) -> SamplingParams:
    values: dict[str, Any] = dict(seed=1000 + number, max_tokens=32, ignore_eos=True)
    return SamplingParams(**(values | CONTROLS[number % len(CONTROLS)] | changes))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return pair.prompts(12, longest=30)


@pytest.fixture(scope="module")
def texts(prompts) -> list[list[int]]:
    """Return texts of plain decoding; requests run one after the other."""
    return [
        tokens_of(generate(pair.plain_engine(), [prompt], seeded(number)))[0]
        for number, prompt in enumerate(prompts)
    ]


def params_of(prompts: list[list[int]], **changes: Any) -> list[SamplingParams]:
    return [seeded(number, **changes) for number in range(len(prompts))]


def test_batch_size_changes_no_seeded_text(prompts, texts):
    plain = pair.plain_engine()
    assert tokens_of(generate(plain, prompts, params_of(prompts))) == texts


def test_preemption_changes_no_seeded_text_without_drafts(prompts):
    """The engine has two rows, and pages for little more than one sequence."""
    longer = [(prompt * 40)[:50] for prompt in prompts]
    params = params_of(prompts)
    alone = [
        tokens_of(generate(pair.plain_engine(), [prompt], own))[0]
        for prompt, own in zip(longer, params, strict=True)
    ]
    engine = proposers.with_config(pair.plain_engine(), num_pages=44)
    with constant_times():
        assert tokens_of(generate(engine, longer, params)) == alone
    assert engine.stats.num_preemptions > 0
    engine.scheduler.check_idle()


def test_order_and_other_requests_change_no_seeded_text(prompts, texts):
    """The other requests are greedy or unseeded, or have another number of drafts."""
    others = [
        SamplingParams(temperature=0, max_tokens=7, ignore_eos=True),
        SamplingParams(temperature=1.0, max_tokens=11, ignore_eos=True),
        SamplingParams(
            temperature=0.5, max_tokens=9, extra_args={"num_speculative_tokens": 0}
        ),
    ]
    mixed, params = [], []
    for number in reversed(range(len(prompts))):
        mixed += [prompts[number], prompts[number - 1]]
        params += [seeded(number), others[number % len(others)]]
    said = tokens_of(generate(pair.engine(seed=9), mixed, params))
    assert said[::2] == texts[::-1]


def test_different_seeds_give_different_texts(prompts, texts):
    again = [prompts[0]] * 6
    params = [seeded(0, seed=seed) for seed in (0, 1, -1, 2**32, 2**40, 1000)]
    said = tokens_of(generate(pair.engine(), again, params))
    assert len({tuple(tokens) for tokens in said}) == 6
    assert said[-1] == texts[0]


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_unseeded_texts_differ_and_repeat_with_the_engines_seed(rule, prompts):
    def say(seed: int) -> list[list[int]]:
        engine = pair.engine(seed=seed, rejection_sample_method=rule)
        again = [prompts[5]] * 6
        params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
        return tokens_of(generate(engine, again, params))

    first = say(3)
    assert len({tuple(tokens) for tokens in first}) == 6
    assert say(3) == first
    assert not {tuple(tokens) for tokens in say(4)} & {tuple(t) for t in first}


MANY_CONTROLS: list[dict[str, Any]] = [
    dict(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    for temperature in (0.3, 0.8, 1.0, 1.5)
    for top_p in (0.6, 0.9, 0.95, 1.0)
    for top_k in (0, 5, 20, 60)
    for min_p in (0.0, 0.02, 0.1, 0.3)
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_filters_are_independent_of_drafts_and_batches(dtype):
    """Prompts may have near ties here, so programs are compiled with users' options."""
    count = len(MANY_CONTROLS)
    prompts = pair.prompts(count, seed=3)
    params = [
        SamplingParams(seed=number, max_tokens=64, ignore_eos=True, **controls)
        for number, controls in enumerate(MANY_CONTROLS)
    ]
    changes: dict[str, Any] = dict(dtype=dtype, has_one_shape=True, is_optimized=True)
    changes |= pair.settings(max_num_seqs=8, num_pages=8 * 28)
    plain = make_engine(pair.target(), **changes)
    draft = pair.draft("noisy")
    engine = make_engine(pair.target(), draft, num_draft_tokens=5, **changes)
    texts = tokens_of(generate(engine, prompts, params))
    assert engine.stats.num_accepted_tokens
    assert tokens_of(generate(plain, prompts, params)) == texts
    for number in range(0, count, 16):
        (alone,) = generate(engine, [prompts[number]], params[number])
        assert list(alone.outputs[0].token_ids) == texts[number]


def test_engines_that_share_pages_change_no_seeded_text(prompts, texts):
    number = max(range(len(prompts)), key=lambda number: len(prompts[number]))
    for _ in range(2):
        found = generate(pair.plain_engine(), [prompts[number]], seeded(number))
        assert tokens_of(found) == [texts[number]]
        generate(with_settings(pair.plain_engine()), prompts, params_of(prompts))
