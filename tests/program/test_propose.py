"""A new proposer needs one file and one registry line, as toy proposers show."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.program_cache import ProgramCache
from jaxspec.program.propose import (
    PROPOSERS,
    Observer,
    Proposal,
    ProposerContext,
    Seen,
    proposers_of,
)
from jaxspec.program.token_batch import make_token_batch
from jaxspec.sampling_params import SamplingParams
from tests.support.engines import (
    MICRO,
    OneGreedyProgramRunner,
    generate,
    make_engine,
    make_micro,
    tokens_of,
)

PROMPTS = [[5, 6, 7], [9, 8, 3, 4] * 3, [11] * 5]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
NUM_DRAFT = 3
HIDDEN_SIZE = MICRO["hidden_size"]


@dataclass(frozen=True)
class Parrot:
    """Proposes the last known token again and again, and counts its rounds."""

    has_params: ClassVar[bool] = False
    may_find_none: ClassVar[bool] = False
    may_find_few: ClassVar[bool] = False
    is_unused_without_drafts: ClassVar[bool] = False

    def state_forms(self, dtype: Any, pool: Any, mesh: Any) -> Any:
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        return jax.ShapeDtypeStruct((pool.num_rows,), jnp.int32, sharding=whole)

    def draft_prefill(
        self,
        params: Any,
        state: Any,
        context: ProposerContext,
        active: Any,
        next_tokens: Any,
    ) -> tuple[Any, None]:
        return state, None

    def propose(
        self, params: Any, state: Any, context: ProposerContext, before: Proposal | None
    ) -> tuple[Proposal, Any]:
        active, count = context.active, context.tree.num_nodes
        row = jnp.where(active.is_active, active.row, state.shape[0])
        tokens = jnp.repeat(active.last_tokens[:, 1:], count, axis=1)
        proposal = Proposal(tokens, jnp.full_like(active.row, count))
        return proposal, state.at[row].add(1, mode="drop")


def make_small(target: Any, **drafts: Any) -> LLMEngine:
    """Make an engine without a program cache, whose keys ignore toy proposers."""
    engine = make_engine(
        target,
        max_num_seqs=4,
        max_num_batched_tokens=96,  # enough for all prompts in one launch
        runner=OneGreedyProgramRunner,
        **drafts,
    )
    engine.runner.cache = ProgramCache(None)
    return engine


@dataclass(frozen=True)
class Listener(Parrot):
    """Stores the target's hidden state of every token, at the token's slot."""

    target_layers: tuple[int, ...] = (2, 0)

    def state_forms(self, dtype: Any, pool: Any, mesh: Any) -> Any:
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        slots = (pool.num_pages * pool.page_size, len(self.target_layers), HIDDEN_SIZE)
        kept = jax.ShapeDtypeStruct(slots, jnp.float32, sharding=whole)
        return super().state_forms(dtype, pool, mesh), kept

    def propose(
        self, params: Any, state: Any, context: ProposerContext, before: Proposal | None
    ) -> tuple[Proposal, Any]:
        proposal, rounds = super().propose(params, state[0], context, before)
        return proposal, (rounds, state[1])

    def observe(
        self, params: Any, state: Any, context: ProposerContext, seen: Seen
    ) -> Any:
        rounds, kept = state
        active, (seqs, width) = context.active, seen.nodes[0].shape[:2]
        node = jnp.arange(width)[None]
        is_kept = active.is_active[:, None] & (node <= seen.num_accepted[:, None])
        region = make_token_batch(
            jnp.zeros((seqs, width), jnp.int32),
            active.num_tokens + width - 1,
            active.page_table,
            is_kept,
            context.pool,
        )
        streams = jnp.stack(seen.nodes, axis=2).reshape(seqs * width, *kept.shape[1:])
        kept = kept.at[region.slot_mapping].set(streams, mode="drop")
        if seen.tiles is not None and context.prompts is not None:
            streams = jnp.stack(seen.tiles, axis=2).reshape(-1, *kept.shape[1:])
            slots = context.prompts.slot_mapping
            kept = kept.at[slots].set(streams, mode="drop")
        return rounds, kept


@pytest.mark.parametrize(
    "may_find_none", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_toy_proposer_needs_one_registry_line(monkeypatch, may_find_none):
    """It receives the target's hidden states, and its drafts change no text."""
    monkeypatch.setattr(Listener, "may_find_none", may_find_none)
    monkeypatch.setitem(PROPOSERS, "ngram", lambda config: Listener())
    target = make_micro(num_hidden_layers=3)
    engine = make_small(target, num_draft_tokens=NUM_DRAFT, lookup=(3, 1))
    assert proposers_of(engine.config) == (Listener(),)
    assert isinstance(Listener(), Observer)
    texts = tokens_of(generate(engine, PROMPTS, PARAMS))
    assert texts == tokens_of(generate(make_small(target), PROMPTS, PARAMS))
    assert 0 < engine.stats.acceptance_rate < 1
    state = engine.runner.state
    rounds, kept = map(np.asarray, state.proposers[0])
    assert rounds.sum() > 0
    tables = np.asarray(state.rows.page_table)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        # The target has not read the last token yet.
        tokens = [*prompt, *text][:-1]
        expected = hf_streams(target, tokens)[list(Listener().target_layers)]
        position = np.arange(len(tokens))
        page_size = engine.config.page_size
        slots = tables[:, position // page_size] * page_size + position % page_size
        found = kept[np.minimum(slots, len(kept) - 1)]
        errors = [np.abs(one.swapaxes(0, 1) - expected).max() for one in found]
        assert min(errors) < 1e-4


def hf_streams(model: Any, tokens: list[int]) -> np.ndarray:
    """Return the residual stream before every layer, and the normalised last one."""
    with torch.no_grad():
        found = model(torch.tensor([tokens]), output_hidden_states=True)
    return np.concatenate([np.asarray(one) for one in found.hidden_states])


def test_proposers_run_in_the_order_of_the_method():
    target = make_micro()
    engine = make_engine(
        target, make_micro(seed=1), num_draft_tokens=NUM_DRAFT, lookup=(3, 1)
    )
    names = [type(one).__name__ for one in proposers_of(engine.config)]
    assert names == ["NGram", "DraftModel"]
    assert proposers_of(make_engine(target).config) == ()
