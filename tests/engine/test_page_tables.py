"""Requests begin with pages of earlier ones exactly where that is allowed.

`FakeDevice` asserts that what they find was written for their very tokens.
"""

import pytest

from tests.loops import make_config, make_requests, run_traffic


def test_prompts_that_begin_alike_are_fed_once():
    config = make_config(max_num_seqs=4, num_pages=200, max_num_batched_tokens=32)
    requests = make_requests(config, 4)
    loop = run_traffic(config, requests)
    # All full pages but that of the last prompt token come from the first request.
    assert [request.num_cached_tokens for request in requests] == [0, 68, 68, 68]
    fed = sum(len(t.tokens) for one in loop.launches for t in one.plan.tiles)
    assert fed == 70 + 3 * 2
    stats = loop.scheduler.stats
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (280, 3 * 68)


@pytest.mark.parametrize(
    ("config", "request_", "cached"),
    [
        ({}, {}, 68),
        ({}, dict(can_read_prefix_cache=False), 0),
        (dict(enable_prefix_caching=False), {}, 0),
        (dict(enable_prefix_caching=False), dict(cache_group=7), 68),
    ],
)
def test_who_reads_the_prefix_cache(config, request_, cached):
    config = make_config(num_pages=200, **config)
    requests = make_requests(config, 2, **request_)
    run_traffic(config, requests)
    assert [request.num_cached_tokens for request in requests] == [0, cached]


def test_salts_keep_requests_apart():
    config = make_config(num_pages=200, max_num_seqs=1)
    requests = make_requests(config, 4)
    for request, salt in zip(requests, ("a", "b", "a", None), strict=True):
        request.cache_salt = salt
    run_traffic(config, requests)
    assert [request.num_cached_tokens for request in requests] == [0, 0, 68, 0]


def test_what_was_generated_is_found_again():
    """The next turn of a conversation begins with the answer to the one before."""
    for num_draft in (0, 3):
        config = make_config(num_pages=200, num_draft_tokens=num_draft)
        prompt = [1] * 30
        (first,) = make_requests(config, 1, prompt_token_ids=prompt, max_total=92)
        loop = run_traffic(config, [first])
        (second,) = make_requests(config, 1, max_total=95)
        second.prompt_token_ids = [*prompt, *first.output_token_ids, 1]
        loop.scheduler.add(second)
        while loop.step():
            pass
        loop.assert_said_the_truth(second)
        # Of 92 tokens the last one has no keys and values, so its page is not whole.
        assert second.num_cached_tokens == 88


def test_resetting_the_prefix_cache():
    config = make_config(num_pages=200)
    first, second = make_requests(config, 2)
    loop = run_traffic(config, [first])
    loop.scheduler.add(second)
    loop.step()
    assert not loop.scheduler.reset_prefix_cache()
    while loop.step():
        pass
    assert second.num_cached_tokens == 68
    assert loop.scheduler.reset_prefix_cache()
    assert loop.scheduler.pages.num_findable == 0
    (third,) = make_requests(config, 1)
    loop.scheduler.add(third)
    while loop.step():
        pass
    assert third.num_cached_tokens == 0
