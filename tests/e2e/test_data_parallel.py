"""Data-parallel engines, each with its own devices, return the texts of one engine."""

import functools
from typing import Any

import jax
import pytest

from jaxspec import LLM, EngineArgs
from jaxspec.engine.engine_group import EngineGroup
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.errors import ConfigError, UnsupportedError
from jaxspec.sampling_params import SamplingParams
from tests.support import pair
from tests.support.engines import generate, tokens_of

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=7, max_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, max_tokens=24, ignore_eos=True)


def make_group(count: int, **changes: Any) -> list[LLMEngine]:
    return [
        pair.own_engine(data_parallel_size=count, data_parallel_rank=rank, **changes)
        for rank in range(count)
    ]


@functools.cache
def prompts() -> list[list[int]]:
    return pair.prompts(7, longest=30)


def params() -> list[SamplingParams]:
    return [(GREEDY, SEEDED)[number % 2] for number in range(len(prompts()))]


def test_two_engines_give_the_texts_of_one_engine():
    engines = make_group(2)
    devices = [list(engine.runner.mesh.devices.flat) for engine in engines]
    assert devices == [[one] for one in jax.devices()[:2]]
    placed = [jax.tree.leaves(engine.runner.state)[0].devices() for engine in engines]
    assert placed == [{one} for one in jax.devices()[:2]]
    group: Any = EngineGroup(engines)
    expected = tokens_of(generate(pair.engine(), prompts(), params()))
    assert tokens_of(generate(group, prompts(), params())) == expected
    assert all(engine.stats.num_draft_tokens for engine in engines)
    # Requests without a seed get a seed that does not depend on the engine.
    same = tokens_of(generate(group, [prompts()[0]] * 6, [DRAWN] * 6))
    assert len({tuple(tokens) for tokens in same}) == 6
    group.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("devices_each", [1, 2])
def test_engines_of_several_devices_give_the_texts_of_one_engine(devices_each: int):
    count = 4 if devices_each == 1 else 2
    group: Any = EngineGroup(make_group(count, tensor_parallel_size=devices_each))
    plain = pair.plain_engine()
    listed = params()
    assert tokens_of(generate(group, prompts(), listed)) == tokens_of(
        generate(plain, prompts(), listed)
    )
    used = [one.runner.mesh.devices.flat for one in group.engines]
    assert [one for some in used for one in some] == jax.devices()[
        : count * devices_each
    ]
    group.shutdown()


@pytest.mark.slow
def test_several_engines_of_the_bundled_pair():
    """The arguments of `LLM` create several engines, which generate texts."""
    arguments: dict[str, Any] = dict(
        model="jaxspec/tiny-gemma2",
        speculative_model="jaxspec/tiny-gemma2-draft",
        num_speculative_tokens=3,
        max_model_len=256,
        max_num_seqs=4,
    )
    texts = ["Once upon a time", "def main(", "17 times 23 is", "List files by size"]
    drawn = SamplingParams(max_tokens=16, temperature=0.8, seed=3)
    greedy = SamplingParams(max_tokens=16, temperature=0)
    said = []
    for count in (1, 2):
        with LLM(**arguments, data_parallel_size=count) as llm:
            assert llm.get_world_size() == count
            params = [greedy] * len(texts) + [drawn] * len(texts)
            outputs = llm.generate(texts * 2, params, use_tqdm=False)
            said.append([output.outputs[0].text for output in outputs])
    assert said[0] == said[1]


def test_too_few_devices_for_all_engines_are_rejected():
    message = (
        "data_parallel_size=3 engines of tensor_parallel_size=4 need 12 devices, and 8 "
        r"cpu device\(s\) are present: lower data_parallel_size to at most 2"
    )
    with pytest.raises(ConfigError, match=message):
        LLM(
            "jaxspec/tiny-gemma2",
            data_parallel_size=3,
            tensor_parallel_size=4,
            max_model_len=64,
        )
    with pytest.raises(ConfigError, match="data_parallel_size must be an integer of"):
        LLM("jaxspec/tiny-gemma2", data_parallel_size=0)
    with pytest.raises(UnsupportedError, match="an LLMEngine is one engine"):
        args = EngineArgs(model="jaxspec/tiny-gemma2", data_parallel_size=2)
        LLMEngine.from_engine_args(args)
