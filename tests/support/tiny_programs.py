"""Substitutes for step programs: equal arguments and results, quick to compile."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.models.families import config_from_hf
from jaxspec.program.executable_args import flatten
from jaxspec.program.plan import PoolShape, StepShape
from jaxspec.program.state import EngineState
from jaxspec.program.step_context import ProgramConfig
from jaxspec.sharding import make_mesh
from jaxspec_checkpoints.gemma.published import published_config

SHAPE = StepShape(num_seqs=1, num_levels=2, max_prompt_tokens=0)
POOL = PoolShape(num_rows=1, num_pages=4, page_size=4, max_model_len=8, vocab_size=16)
PLAN = np.arange(3, dtype=np.int32)


def as_state(rows: Any) -> EngineState:
    form: Any = EngineState
    return form(rows=rows, token_pages=(), target_pages=(), proposers=())


def lower_sums(program, shape, arguments, *, name):
    """Lower a substitute for a step, which only sums its arguments."""

    def run(params, state, plan):
        (weights,), (rows,) = params, state
        return [rows + weights.sum()], plan + shape.num_seqs

    run.__name__ = name
    whole = NamedSharding(program.mesh, PartitionSpec())
    forms = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding
        ),
        flatten(arguments),
    )
    plan = jax.ShapeDtypeStruct(PLAN.shape, jnp.int32, sharding=whole)
    return jax.jit(run).lower(*forms, plan)


def lower_round(program, shape, arguments, *, name):
    """Lower a substitute that XLA:CPU compiles to several functions."""

    def run(params, state, plan):
        (weights,), (rows,) = params, state
        square = jnp.outer(weights, weights) / 64
        found = jnp.tanh(square @ square) * jax.nn.softmax(square)
        return [rows + found.sum()], plan

    run.__name__ = name
    return jax.jit(run).lower(*flatten(arguments), PLAN)


def make_program(num_devices: int = 1) -> ProgramConfig:
    target = config_from_hf(published_config("2b"))
    return ProgramConfig(target=target, pool=POOL, mesh=make_mesh(num_devices))


def make_arguments(mesh: Mesh) -> Any:
    row = NamedSharding(mesh, PartitionSpec(mesh.axis_names[-1]))
    weights = jax.device_put(np.arange(8, dtype=np.float32), row)
    rows = jax.device_put(np.ones(4, np.float32), NamedSharding(mesh, PartitionSpec()))
    return {"w": weights}, (), as_state(rows)
