import dataclasses

from jaxspec.logprobs import Logprob


def test_fields_equal_vllms():
    entry = Logprob(-0.5)
    assert dataclasses.astuple(entry) == (-0.5, None, None)
    assert Logprob(-0.5, 1, "a") == Logprob(logprob=-0.5, rank=1, decoded_token="a")
