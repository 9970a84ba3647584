"""Stands in for vLLM: each of its modules has the names of jaxspec's module.

A name that jaxspec does not have can be imported. `NotInJaxspecError` is raised where
it is used, so that the other tests of a file run.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any, NoReturn


class NotInJaxspecError(NotImplementedError):
    """A test uses a part of vLLM that jaxspec does not have."""


class _Absent(type):
    """The type of names that jaxspec does not have: classes that cannot be used."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__name__}.{name}")

    def __bool__(cls) -> bool:
        return False

    def __call__(cls, *_: object, **__: object) -> NoReturn:
        raise NotInJaxspecError(f"jaxspec has no {cls.__name__}")


def absent(name: str) -> Any:
    """Return a class with this name that raises where it is called."""
    return _Absent(name, (), {})


class _Module(types.ModuleType):
    """A module of vLLM."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        home = self.__dict__.get("home")
        try:
            return getattr(home, name)
        except AttributeError:
            pass
        path = f"{self.__name__}.{name}"
        if hasattr(home, "__path__") and importlib.util.find_spec(
            f"{home.__name__}.{name}"
        ):
            return importlib.import_module(path)
        return absent(path.removeprefix("vllm."))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of vLLM."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("vllm."):
            return None
        is_package = not name.endswith(".__main__")
        return importlib.machinery.ModuleSpec(name, self, is_package=is_package)

    def get_code(self, name: str) -> types.CodeType:
        """Return what `python -m` runs for a module: jaxspec's server."""
        return compile(
            "from jaxspec.__main__ import main; import sys; sys.argv[0] = 'vllm'; "
            "sys.exit(main(['serve', *sys.argv[1:]]))",
            name,
            "exec",
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> _Module:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        _fill(module)


def _fill(module: types.ModuleType) -> None:
    name = "jaxspec" + module.__name__.removeprefix("vllm")
    try:
        module.__dict__["home"] = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("jaxspec"):
            raise


sys.meta_path.insert(0, _Finder())
sys.modules[__name__].__class__ = _Module
_fill(sys.modules[__name__])
