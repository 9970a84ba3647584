"""A network's declared parameters as Flax variables, and back.

For Flax modules that wrap functional networks: the variables are `nnx.Param`s with the
metadata `axes` and `unit`, named as in the tree.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx, traverse_util

from jaxspec.models.params import Params, Specs


def as_variables(specs: Specs, dtype: jnp.dtype) -> dict[str, Any]:
    """Make a tree of parameters, filled with zeros."""
    flat = {
        path: nnx.Param(jnp.zeros(spec.shape, dtype), axes=spec.axes, unit=spec.unit)
        for path, spec in specs.items()
    }
    return traverse_util.unflatten_dict(flat)


def as_module(tree: Any) -> Any:
    """Make a module from a tree of variables; a single variable is returned as is."""
    if not isinstance(tree, dict):
        return tree
    return nnx.Dict({name: as_module(part) for name, part in tree.items()})


def bound_params(module: nnx.Module, specs: Specs) -> Params:
    """Return the parameter tree of a module, as the network's functions take it."""
    state = nnx.to_flat_state(nnx.state(module, nnx.Param))
    values = {tuple(map(str, path)): variable[...] for path, variable in state}
    flat = {path: spec.wrap(values[path]) for path, spec in specs.items()}
    return traverse_util.unflatten_dict(flat)
