"""A sleeping engine holds no device memory, and wakes up as it was."""

from typing import Any

import jax
import pytest

import jaxspec.engine.sleeping
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.errors import RequestError
from jaxspec.sampling_params import SamplingParams
from tests.e2e import pair
from tests.engines import generate, make_engine, tokens_of

PROMPTS = [[2, 5, 6, 7], [2, 9]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=12, ignore_eos=True),
]


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    """With arrays of its own: other engines must not sleep along."""
    return make_engine(
        pair.target(),
        pair.draft("noisy"),
        num_draft_tokens=pair.NUM_DRAFT,
        **pair.SETTINGS,
    )


def texts(engine: LLMEngine) -> list[list[int]]:
    return tokens_of(generate(engine, PROMPTS, PARAMS))


def arrays(engine: LLMEngine) -> list[Any]:
    return jax.tree.leaves((engine.runner.params, engine.runner.state))


def test_nothing_is_left_on_the_devices_and_all_comes_back(engine: LLMEngine):
    before = texts(engine)
    compiled = engine.runner.num_compiles
    placements = [array.sharding for array in arrays(engine)]
    for _ in range(2):
        engine.sleep()
        engine.sleep()  # has nothing more to do
        assert engine.is_sleeping()
        assert all(array.is_deleted() for array in arrays(engine))
        engine.wake_up()
        assert not engine.is_sleeping()
        assert not any(array.is_deleted() for array in arrays(engine))
        assert [array.sharding for array in arrays(engine)] == placements
        assert texts(engine) == before
    assert engine.runner.num_compiles == compiled


def test_level_2_reads_the_weights_again(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
):
    before = texts(engine)
    kept = jax.device_get(engine.runner.params)
    reads = []

    def load(config: Any, mesh: Any) -> Any:
        reads.append(config)
        placements = jax.tree.map(lambda array: array.sharding, engine.runner.params)
        return jax.device_put(kept, placements)

    monkeypatch.setattr(jaxspec.engine.sleeping, "load_weights", load)
    engine.sleep(level=2)
    assert not reads
    engine.wake_up()
    assert reads == [engine.config]
    assert texts(engine) == before


def test_parts_wake_up_one_by_one(engine: LLMEngine):
    before = texts(engine)
    engine.sleep()
    engine.wake_up(tags=["weights"])
    assert engine.is_sleeping()
    assert not any(
        array.is_deleted() for array in jax.tree.leaves(engine.runner.params)
    )
    assert engine.runner.state.rows.num_tokens.is_deleted()
    with pytest.raises(RequestError, match=r"sleeps.* call wake_up\(\)"):
        engine.add_request("0", [2], SamplingParams())
    engine.wake_up(tags=["weights"])
    engine.wake_up(tags=["kv_cache"])
    assert not engine.is_sleeping()
    assert texts(engine) == before


def test_only_an_idle_engine_sleeps(engine: LLMEngine):
    engine.add_request("0", [2, 3], SamplingParams(max_tokens=20))
    with pytest.raises(RequestError, match="1 requests run"):
        engine.sleep()
    engine.step()
    engine.abort_request("0")
    while engine.has_unfinished_requests():
        engine.step()
    engine.sleep()
    engine.wake_up()


@pytest.mark.parametrize("level", [0, 3])
def test_another_level(engine: LLMEngine, level: int):
    with pytest.raises(RequestError, match="level must be an integer from 1 to 2"):
        engine.sleep(level)
    assert not engine.is_sleeping()


def test_another_tag(engine: LLMEngine):
    with pytest.raises(RequestError, match="'weights', 'kv_cache', got 'all'"):
        engine.wake_up(tags=["weights", "all"])
