"""Several texts of one request are those of as many requests, told as one."""

import pytest

from jaxspec.errors import RequestError
from jaxspec.metrics import Histogram
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.test_llm_engine import (
    PROMPT,
    admissions,
    assert_idle,
    make_fake_engine,
    run_all,
    said,
)


def several(kind: RequestOutputKind, count: int = 3, **changes) -> SamplingParams:
    return SamplingParams(n=count, max_tokens=7, output_kind=kind, **changes)


@pytest.mark.parametrize("cache", [True, False])
def test_a_final_output_has_all_texts_and_shares_the_prompt(cache):
    engine, runner = make_fake_engine(
        num_draft_tokens=2, enable_prefix_caching=cache, page_size=1, num_pages=200
    )
    prompt = PROMPT * 5
    engine.add_request("a", prompt, several(RequestOutputKind.FINAL_ONLY))
    (outputs,) = run_all(engine).values()
    (output,) = outputs
    assert output.finished
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert all(len(completion.token_ids) == 7 for completion in output.outputs)
    assert output.prompt_token_ids == prompt
    fed = sum(len(tile.tokens) for plan, _ in runner.plans for tile in plan.tiles)
    assert fed == len(prompt) + 2
    assert_idle(engine)


def test_deltas_and_cumulative_outputs_add_up():
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
        engine, _ = make_fake_engine(num_draft_tokens=3)
        engine.add_request("a", PROMPT, several(kind))
        (outputs,) = run_all(engine).values()
        assert [output.finished for output in outputs] == [
            *[False] * (len(outputs) - 1),
            True,
        ]
        texts: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for output in outputs:
            indices = [completion.index for completion in output.outputs]
            assert indices == sorted(set(indices))
            for completion in output.outputs:
                new = list(completion.token_ids)
                before = texts[completion.index]
                is_delta = kind is RequestOutputKind.DELTA
                texts[completion.index] = before + new if is_delta else new
        assert list(texts.values()) == [said(7)] * 3
        assert_idle(engine)


def test_text_i_has_the_seed_plus_i():
    engine, runner = make_fake_engine()
    params = several(RequestOutputKind.FINAL_ONLY, seed=40)
    engine.add_request("a", PROMPT, params)
    run_all(engine)
    assert sorted(one.seed for one in admissions(runner)) == [(0, 40), (0, 41), (0, 42)]


def test_unseeded_texts_differ():
    engine, runner = make_fake_engine()
    engine.add_request("a", PROMPT, several(RequestOutputKind.FINAL_ONLY))
    run_all(engine)
    assert len({one.seed for one in admissions(runner)}) == 3


@pytest.mark.parametrize("when", [0, 1, 3])
def test_aborting_a_request_ends_all_its_texts(when):
    engine, _ = make_fake_engine(num_draft_tokens=2)
    engine.add_request("a", PROMPT, several(RequestOutputKind.DELTA))
    engine.add_request("b", PROMPT, SamplingParams(max_tokens=5))
    for _ in range(when):
        engine.step()
    engine.abort_request("a")
    assert engine.get_num_unfinished_requests() == 1
    outputs = run_all(engine)
    assert outputs.keys() == {"b"}
    assert_idle(engine)


def test_a_text_has_no_id_of_its_own():
    engine, _ = make_fake_engine()
    engine.add_request("a", PROMPT, several(RequestOutputKind.FINAL_ONLY))
    engine.abort_request("0_a")
    assert engine.get_num_unfinished_requests() == 3
    with pytest.raises(RequestError, match="'1_a' is running already"):
        engine.add_request("1_a", PROMPT, SamplingParams())
    (output,) = run_all(engine)["a"]
    assert len(output.outputs) == 3
    assert_idle(engine)


def test_ids_of_texts_that_are_in_use_are_refused():
    engine, _ = make_fake_engine()
    engine.add_request("0_a", PROMPT, SamplingParams(max_tokens=5))
    with pytest.raises(RequestError, match="'0_a' is running already"):
        engine.add_request("a", PROMPT, several(RequestOutputKind.FINAL_ONLY))
    assert run_all(engine).keys() == {"0_a"}
    assert_idle(engine)


def test_seeds_of_all_texts_must_fit():
    engine, _ = make_fake_engine()
    last = 2**63 - 3
    engine.add_request("a", PROMPT, several(RequestOutputKind.FINAL_ONLY, seed=last))
    with pytest.raises(RequestError, match=f"seed .*to {last}.*Text i of n"):
        several(RequestOutputKind.FINAL_ONLY, seed=last + 1)
    run_all(engine)


def test_metrics_count_one_request_and_its_longest_text():
    engine, _ = make_fake_engine(disable_log_stats=False)
    engine.add_request("a", PROMPT, several(RequestOutputKind.DELTA))
    engine.add_request("b", PROMPT, SamplingParams(max_tokens=2))
    run_all(engine)
    engine.add_request("c", PROMPT, several(RequestOutputKind.DELTA, 2))
    engine.abort_request("c")
    found = {metric.name: metric for metric in engine.get_metrics()}
    for name, values in (
        ("params_n", (1, 2, 3)),
        ("max_num_generation_tokens", (7, 2)),
    ):
        seen = found[f"vllm:request_{name}"]
        assert isinstance(seen, Histogram)
        assert (seen.count, seen.sum) == (3, sum(values))
    seen = found["vllm:request_generation_tokens"]
    assert isinstance(seen, Histogram)
    assert (seen.count, seen.sum) == (6, 7 * 3 + 2)


def test_an_id_in_use_is_refused():
    engine, _ = make_fake_engine()
    engine.add_request("a", PROMPT, several(RequestOutputKind.DELTA))
    with pytest.raises(RequestError, match="'a' is running already"):
        engine.add_request("a", PROMPT, SamplingParams())
    run_all(engine)
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=1))
    run_all(engine)
