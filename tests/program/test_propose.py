"""A proposer is one file and one line: a toy, its own state, and the engine's texts."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.program.propose import PROPOSERS, Context, Proposal, proposers_of
from jaxspec.sampling_params import SamplingParams
from tests.engines import generate, make_engine, make_micro, tokens_of

PROMPTS = [[5, 6, 7], [9, 8, 3, 4] * 3, [11] * 5]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
NUM_DRAFT = 3


@dataclass(frozen=True)
class Parrot:
    """Proposes the last known token again and again, and counts its rounds."""

    has_params: ClassVar[bool] = False
    may_find_none: ClassVar[bool] = False

    def state_forms(self, dtype: Any, pool: Any, mesh: Any) -> Any:
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        return jax.ShapeDtypeStruct((pool.num_rows,), jnp.int32, sharding=whole)

    def prefill(self, params: Any, state: Any, context: Context) -> Any:
        return state

    def catch_up(
        self, params: Any, state: Any, context: Context, active: Any, following: Any
    ) -> tuple[Any, None]:
        return state, None

    def propose(
        self, params: Any, state: Any, context: Context, before: Proposal | None
    ) -> tuple[Proposal, Any]:
        active, count = context.active, context.tree.num_nodes
        row = jnp.where(active.is_active, active.row, state.shape[0])
        tokens = jnp.repeat(active.last_tokens[:, 1:], count, axis=1)
        proposal = Proposal(tokens, jnp.full_like(active.row, count))
        return proposal, state.at[row].add(1, mode="drop")


def test_a_toy_proposer_is_one_registry_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(PROPOSERS, "ngram", lambda config: Parrot())
    target = make_micro()
    plain = tokens_of(generate(make_engine(target), PROMPTS, PARAMS))
    engine = make_engine(target, num_draft_tokens=NUM_DRAFT, lookup=(3, 1))
    assert proposers_of(engine.config) == (Parrot(),)
    found = tokens_of(generate(engine, PROMPTS, PARAMS))
    assert found == plain
    (rounds,) = engine.runner.state.proposers
    assert np.asarray(rounds).sum() > 0
    # Some of what it said was what the target would have said.
    assert 0 < engine.stats.acceptance_rate < 1


def test_proposers_come_in_the_order_of_the_method():
    target = make_micro()
    engine = make_engine(
        target, make_micro(seed=1), num_draft_tokens=NUM_DRAFT, lookup=(3, 1)
    )
    names = [type(one).__name__ for one in proposers_of(engine.config)]
    assert names == ["NGram", "DraftModel"]
    assert proposers_of(make_engine(target).config) == ()
