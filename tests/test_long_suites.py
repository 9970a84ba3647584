"""A long suite is due if and only if one of its sources has changed."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests import long_suites
from tests.long_suites import ROOT, SUITES, LongSuite

MODULE = '''"""A module."""

# A comment.
def double(value):
    """Twice."""
    return 2 * value  # why


NAME = """# a string
is no comment"""
'''


def test_every_mark_names_a_suite_with_its_file():
    marked = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        names = re.findall(r'long_suite\(name="(\w+)"\)', text)
        names += re.findall(r'members\(\s*"(\w+)"', text)
        marked |= {(name, path.relative_to(ROOT).as_posix()) for name in names}
    declared = {(one.name, file) for one in SUITES for file in one.files}
    assert marked == declared


@pytest.mark.parametrize("one", SUITES, ids=lambda one: one.name)
def test_sources_exist(one: LongSuite):
    sources = {path.relative_to(ROOT).as_posix() for path in one.sources()}
    assert set(one.files) <= sources
    assert any(source.startswith(("kernels/", "jaxspec/")) for source in sources)
    for place in one.reads:
        assert any(source.startswith(place) for source in sources), place
    for glob in one.data:
        # Tuning files exist only for the devices that have been tuned.
        assert "tuned" in glob or list(ROOT.glob(glob)), glob


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LongSuite:
    """Return a long suite in a temporary repository."""
    files = {
        "tests/test_a.py": "from jaxspec.engine.b import c\nimport jaxspec.text\n",
        "jaxspec/engine/b.py": "from jaxspec import config\nc = 1\n",
        "jaxspec/config.py": "d = 1\n",
        "jaxspec/text.py": "e = 1\n",
        "jaxspec/engine/unread.py": "f = 1\n",
        "results.json": "[]",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(long_suites, "ROOT", tmp_path)
    monkeypatch.setattr(long_suites, "RECORD", tmp_path / "long_suites.json")
    return LongSuite(
        name="one",
        files=("tests/test_a.py",),
        reads=("tests/", "jaxspec/engine/", "jaxspec/config.py"),
        data=("res*.json",),
    )


@pytest.mark.parametrize(
    ("file", "is_read"),
    [
        ("tests/test_a.py", True),
        ("jaxspec/engine/b.py", True),
        ("jaxspec/config.py", True),
        ("results.json", True),
        ("jaxspec/text.py", False),
        ("jaxspec/engine/unread.py", False),
    ],
)
def test_changed_sources_make_it_due(one: LongSuite, file: str, *, is_read: bool):
    record = {"one": {"digest": one.digest()}}
    long_suites.RECORD.write_text(json.dumps(record))
    assert not long_suites.is_due(one)
    path = long_suites.ROOT / file
    before = path.read_text()
    path.write_text(before + "# said\n" if path.suffix == ".py" else before)
    assert not long_suites.is_due(one)
    path.write_text(before + "x = 2\n")
    assert long_suites.is_due(one) == is_read
    path.write_text(before)
    assert not long_suites.is_due(one)


def test_suite_is_due_until_it_passes(one: LongSuite, monkeypatch: pytest.MonkeyPatch):
    assert long_suites.is_due(one)
    test = long_suites.ROOT / "tests" / "test_a.py"
    mark = f"import pytest\n\n\n@pytest.mark.long_suite(name={one.name!r})\n"
    mark += "def test_it():\n"
    monkeypatch.setattr(long_suites, "ARGUMENTS", ("-q", "-p", "no:cacheprovider"))
    # Importing pytest's plugins would take most of the time.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    test.write_text(f"{mark}    raise ValueError\n")
    assert long_suites.run(one, []) == 1
    assert long_suites.is_due(one)
    test.write_text(f"{mark}    pass\n")
    assert long_suites.run(one, ["-rs"]) == 0
    assert long_suites.is_due(one), "arguments may leave tests out"
    test.write_text(f"{mark}    pytest.skip('no compiler')\n")
    assert long_suites.run(one, []) == 0
    assert long_suites.is_due(one), "nothing has been proven"
    test.write_text(f"{mark}    pass\n")
    assert long_suites.run(one, []) == 0
    assert not long_suites.is_due(one)
    assert long_suites.recorded()["one"]["digest"] == one.digest()


def test_suites_that_would_end_too_late_remain_due(
    one: LongSuite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A suite without a record runs, however long it takes."""
    seconds = {"short": 50, "long": 70}
    record = {name: {"seconds": count} for name, count in seconds.items()}
    long_suites.RECORD.write_text(json.dumps(record))
    suites = [replace(one, name=name) for name in ("long", "short", "new")]
    ran = list[str]()
    monkeypatch.setattr(long_suites, "SUITES", suites)
    monkeypatch.setattr(long_suites, "run", lambda suite, _: ran.append(suite.name))
    monkeypatch.setattr(sys, "argv", ["long_suites", "--minutes", "1"])
    assert long_suites.main() == 0
    assert ran == ["short", "new"]
    assert capsys.readouterr().out.endswith("1 minutes are too few for: long\n")


def test_code_excludes_comments_and_docstrings():
    assert long_suites.code_of(MODULE) == (
        "def double(value):\n    return 2 * value\n"
        'NAME = """# a string\nis no comment"""'
    )


@pytest.mark.parametrize(
    ("name", "is_due"), [("page_writes", True), ("attention_calls", False)]
)
def test_new_compiler_makes_its_suites_due(name, is_due, monkeypatch):
    (one,) = (one for one in SUITES if one.name == name)
    before = one.digest()
    monkeypatch.setattr(long_suites, "compiler_versions", lambda: ["libtpu 9.9"])
    assert (one.digest() != before) == is_due


@pytest.mark.parametrize("one", SUITES, ids=lambda one: one.name)
def test_modules_that_are_imported_by_name_are_sources(one: LongSuite):
    """No `import` names a network, or the kernels of a platform."""
    sources = {path.relative_to(ROOT).as_posix() for path in one.sources()}
    if "jaxspec/models/" in one.reads:
        assert "jaxspec/models/gemma/network.py" in sources
    if "kernels/jaxspec_kernels/" in one.reads:
        file = "tpu" if one.needs_compilers else "cpu"
        assert f"kernels/jaxspec_kernels/paged_attention/{file}.py" in sources
