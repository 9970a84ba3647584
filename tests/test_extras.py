"""A plain install, without any extra, in a process that finds no other packages."""

import json
import re
import tomllib
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from jaxspec.extras import (
    SERVE_PACKAGES,
    MissingExtraError,
    needs_extra,
    require_packages,
)
from tests.support.processes import run_python
from tests.support.source_modules import MODULES, extra_of, module_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
INSTALL = 'pip install "jaxspec-decoding[serve]"'
# Hides packages as if they were not installed.
HIDE = """
import json, sys

class Without:
    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            return None
        return self._finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self._finder, name)

HIDDEN = set(json.loads(sys.argv.pop(1)))
sys.meta_path[:] = map(Without, sys.meta_path)
# Files of the environment (.pth) may import packages at every start.
STARTED = set(sys.modules)
"""


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def plain_distributions() -> set[str]:
    """Return the packages that `pip install .` installs, with all that they require."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in PROJECT["dependencies"]]
    while waiting:
        wanted = waiting.pop()
        name, marker = normalized(wanted.name), wanted.marker
        extras = wanted.extras or {""}
        is_wanted = marker is None or any(
            marker.evaluate({"extra": extra}) for extra in extras
        )
        if is_wanted and name not in found:
            found.add(name)
            with suppress(metadata.PackageNotFoundError):  # of another platform
                waiting += map(Requirement, metadata.requires(wanted.name) or [])
    return found


def hidden_packages() -> list[str]:
    """Return the names of modules that a plain install does not have."""
    plain = plain_distributions() | {"jaxspec-decoding"}
    return [
        name
        for name, owners in metadata.packages_distributions().items()
        if not plain & {normalized(owner) for owner in owners}
    ]


def run_plain(code: str):
    done = run_python("-c", HIDE + code, json.dumps(hidden_packages()))
    assert done.returncode == 0, done.stderr
    return done


def test_serve_packages_are_not_in_a_plain_install():
    # These three come with huggingface_hub, which tokenizers needs, and with flax.
    indirect = {"h11", "prometheus_client", "yaml"}
    assert set(SERVE_PACKAGES) - set(hidden_packages()) == indirect
    extra = PROJECT["optional-dependencies"]["serve"]
    names = {normalized(Requirement(line).name) for line in extra}
    owners = metadata.packages_distributions()
    of_packages = {normalized(one) for name in SERVE_PACKAGES for one in owners[name]}
    assert of_packages == names


def test_modules_without_extra_import_in_a_plain_install():
    names = [module_name(path) for _, path in MODULES if extra_of(path) is None]
    code = f"import importlib\nfor name in {names!r}: importlib.import_module(name)\n"
    run_plain(code + "assert not HIDDEN & (set(sys.modules) - STARTED)")


def test_server_without_its_extra_is_one_line_that_names_it():
    run_plain(f"""
import contextlib, io
from jaxspec.__main__ import main
from jaxspec.serve.__main__ import main as serve

def error_of(run, *arguments):
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        assert run(arguments) == 2
    return text.getvalue()

given = ("chat", "--url", "http://x"), ("bench", "lossless"), ("bench", "serve")
calls = [(main, *one) for one in (("serve",), ("run-batch",), *given)]
for call in [(serve, "--port", "0"), *calls]:
    text = error_of(*call)
    assert text.count("\\n") == 1 and {INSTALL!r} in text, text

try:
    import jaxspec.tool_parsers
except ImportError as error:
    assert {INSTALL!r} in str(error)
else:
    raise AssertionError
from jaxspec.v1.engine.async_llm import AsyncLLM
""")


@pytest.mark.slow
def test_engine_generates_in_a_plain_install():
    code = """
from jaxspec import LLM, SamplingParams
llm = LLM("jaxspec/tiny-gemma2", speculative_model="jaxspec/tiny-gemma2-draft",
          num_speculative_tokens=3, max_num_seqs=1, max_model_len=64)
params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
(output,) = llm.generate("Once upon a time", params, use_tqdm=False)
assert len(output.outputs[0].token_ids) == 8
print(output.outputs[0].text)
"""
    assert run_plain(code).stdout == run_python("-c", "import sys\n" + code).stdout


def test_failed_import_of_our_own_module_is_no_missing_extra():
    with pytest.raises(ModuleNotFoundError, match="jaxspec.no_such"):
        with needs_extra("serve", "A test"):
            import_module("jaxspec.no_such")
    with pytest.raises(MissingExtraError, match=r"A test .*missing: no_such.*serve"):
        require_packages("serve", "A test", ("sys", "no_such"))
