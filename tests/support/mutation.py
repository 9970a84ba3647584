"""Mutation testing: a mutant is a function with a known bug in one place.

Each mutant has a check, which is part of a test and must fail.
"""

import ast
import contextlib
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A bug: `old` becomes `new` in `module.function`, so that `check` must fail."""

    name: str
    module: str
    function: str
    old: str
    new: str
    check: Callable[[], object]


def rewritten(one: Mutant) -> tuple[Callable, Callable]:
    """Return the real function, and its mutant, which has the same globals."""
    module = importlib.import_module(one.module)
    real = getattr(module, one.function)
    file = inspect.getsourcefile(module)
    assert file is not None
    with open(file, encoding="utf-8") as source:
        text = source.read()
    (node,) = (
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name == one.function
    )
    body = "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
    count = body.count(one.old)
    assert count == 1, f"{one.name}: {one.old!r} is {count} times in {one.function}"
    code = textwrap.dedent(body.replace(one.old, one.new))
    made: dict[str, Callable] = {}
    exec(compile(code, f"<{one.name}>", "exec"), module.__dict__, made)
    return real, made[one.function]


@contextlib.contextmanager
def applied(one: Mutant) -> Iterator[None]:
    """Replace every reference to the real function in our packages by the mutant."""
    real, fake = rewritten(one)
    places = [
        (module, name)
        for path, module in list(sys.modules.items())
        if path.startswith(("jaxspec.", "jaxspec_kernels.", "tests."))
        for name, value in vars(module).items()
        if value is real
    ]
    for module, name in places:
        setattr(module, name, fake)
    try:
        yield
    finally:
        for module, name in places:
            setattr(module, name, real)


def is_killed(one: Mutant) -> bool:
    """Return whether the mutant's check fails with an assertion."""
    # Without this, functions that are already traced would run without the mutant.
    jax.clear_caches()
    with applied(one):
        try:
            one.check()
        except AssertionError:
            return True
        finally:
            # Without this, later tests in this process would run the mutant.
            jax.clear_caches()
    return False
