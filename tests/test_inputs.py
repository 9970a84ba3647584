from collections import UserList
from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxspec.errors import RequestError
from jaxspec.inputs import ParsedPrompt, parse_prompt, split_prompts
from jaxspec.sampling_params import SamplingParams

VOCAB_SIZE = 300
MAX_MODEL_LEN = 12


class Bytes:
    """A tokenizer that encodes a text as token 2, and then each byte as byte + 3."""

    def encode(self, text: str) -> list[int]:
        return [2, *(byte + 3 for byte in text.encode())]


def parse(prompt: object) -> ParsedPrompt:
    return parse_prompt(prompt, Bytes(), VOCAB_SIZE, MAX_MODEL_LEN)


@pytest.mark.parametrize(
    ("prompt", "text", "token_ids"),
    [
        ("ab", "ab", [2, 100, 101]),
        ("", "", [2]),
        ({"prompt": "ab"}, "ab", [2, 100, 101]),
        ({"prompt": "ab", "cache_salt": "x"}, "ab", [2, 100, 101]),
        ({"prompt": "ab", "prompt_token_ids": None}, "ab", [2, 100, 101]),
        ({"prompt": "ab", "multi_modal_data": None}, "ab", [2, 100, 101]),
        ([2, 7], None, [2, 7]),
        ((0, VOCAB_SIZE - 1), None, [0, VOCAB_SIZE - 1]),
        (np.array([2, 7], np.int32), None, [2, 7]),
        (np.array("ab"), "ab", [2, 100, 101]),
        (torch.tensor([2, 7]), None, [2, 7]),
        (jnp.array([2, 7]), None, [2, 7]),
        ({"prompt_token_ids": torch.tensor([2, 7])}, None, [2, 7]),
        ({"prompt_token_ids": list(jnp.array([2, 7]))}, None, [2, 7]),
        ({"prompt_token_ids": [2, 7]}, None, [2, 7]),
        ({"prompt_token_ids": [2, 7], "prompt": "shown"}, "shown", [2, 7]),
        ([2] * (MAX_MODEL_LEN - 1), None, [2] * (MAX_MODEL_LEN - 1)),
    ],
)
def test_prompts_of_every_type_are_parsed(prompt, text, token_ids):
    parsed = parse(prompt)
    assert (parsed.text, parsed.token_ids) == (text, token_ids)
    assert all(type(token) is int for token in parsed.token_ids)


@pytest.mark.parametrize(
    ("prompt", "given", "allowed"),
    [
        (None, "None", "a string, a list of token ids"),
        (3, "got 3", "a string, a list of token ids"),
        (b"ab", "b'ab'", "a string"),
        ([], "got []", "at least one token id"),
        ({}, "got {}", "'prompt' or 'prompt_token_ids'"),
        ({"text": "ab"}, "{'text': 'ab'}", "'prompt' or 'prompt_token_ids'"),
        ({"prompt": 3}, "got 3", "a string"),
        ({"prompt_token_ids": []}, "got []", "at least one token id"),
        ({"prompt_token_ids": "x" * 10_000}, "got 'xx", "a list of at least one"),
        ([2, VOCAB_SIZE], f"got {VOCAB_SIZE}", f"from 0 to {VOCAB_SIZE - 1}"),
        ([2, -1], "prompt_token_ids[1]", f"from 0 to {VOCAB_SIZE - 1}"),
        ([2, True], "got True", "an integer"),
        ([2, "a"], "got 'a'", "an integer"),
        ([[2, 3]], "got [2, 3]", "an integer"),
        (np.array([0.5]), "got 0.5", "an integer"),
        (np.array([[2]]), "got [2]", "an integer"),
        ([2] * MAX_MODEL_LEN, "12 tokens", "1 to 11"),
        ("a" * 50, "51 tokens", "1 to 11"),
        ("a" * 12, "13 tokens", "maximum context length is 12 tokens"),
        ("\ud800", "'\\ud800'", "UTF-8"),
    ],
)
def test_bad_prompt_error_has_value_and_allowed_types(prompt, given, allowed):
    with pytest.raises(RequestError) as caught:
        parse(prompt)
    assert given in str(caught.value)
    assert allowed in str(caught.value)
    assert caught.value.parameter is not None
    assert len(str(caught.value)) < 400


def test_rejects_prompts_without_tokens_and_multimodal_prompts():
    tokenizer: Any = SimpleNamespace(encode=lambda text: [])
    with pytest.raises(RequestError, match=r"at least one token, got ''"):
        parse_prompt("", tokenizer, VOCAB_SIZE, MAX_MODEL_LEN)
    for key in ("multi_modal_data", "mm_processor_kwargs", "prompt_embeds"):
        with pytest.raises(NotImplementedError, match=rf"{key}.*17"):
            parse({"prompt": "ab", key: 17})


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("ab", ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        ([2, 3], [[2, 3]]),
        ((2, 3), [[2, 3]]),
        ([[2, 3], [4]], [[2, 3], [4]]),
        ({"prompt": "ab"}, [{"prompt": "ab"}]),
        ([{"prompt": "ab"}, "cd", [2]], [{"prompt": "ab"}, "cd", [2]]),
        ([], []),
        ([2, "a"], [[2, "a"]]),
        (np.array(["ab", "cd"]), ["ab", "cd"]),
        (np.array(["ab", "cd"], object), ["ab", "cd"]),
        (np.array([2, 3]), [[2, 3]]),
        (torch.tensor([2, 3]), [[2, 3]]),
        (jnp.array([2, 3]), [[2, 3]]),
        (torch.tensor([[2, 3], [4, 5]]), [[2, 3], [4, 5]]),
        ([np.array([2, 3]), torch.tensor([4]), "ab"], [[2, 3], [4], "ab"]),
        (list(torch.tensor([2, 3])), [[2, 3]]),
        (UserList(["ab", "cd"]), ["ab", "cd"]),
    ],
)
def test_single_and_multiple_prompts_are_distinguished(prompts, expected):
    assert split_prompts(prompts) == expected


@pytest.mark.parametrize("prompts", [None, 3, {"a", "b"}])
def test_rejects_values_without_prompts(prompts: Any):
    with pytest.raises(RequestError, match=r"a list of these, got"):
        split_prompts(prompts)


def test_token_ids_may_be_an_array():
    params = SamplingParams(stop_token_ids=cast(Any, torch.tensor([2, 7])))
    assert params.stop_token_ids == [2, 7]
