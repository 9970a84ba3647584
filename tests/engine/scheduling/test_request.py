"""A request's tokens, counts and invariant."""

import pytest

from jaxspec.engine.scheduling.request import Status
from tests.support.requests import make_request


def test_tokens_span_prompt_and_output():
    request = make_request(output_token_ids=[8, 9])
    assert request.status is Status.WAITING
    assert (request.num_prompt_tokens, request.num_tokens) == (3, 5)
    whole = [5, 6, 7, 8, 9]
    for start in range(6):
        for end in range(start, 6):
            assert request.tokens(start, end) == whole[start:end]


@pytest.mark.parametrize(
    "broken", [dict(num_prefilled=4), dict(max_total=2), dict(num_prefilled=-1)]
)
def test_inconsistent_token_counts_fail_a_check(broken):
    make_request().check()
    with pytest.raises(AssertionError):
        make_request(**broken).check()
