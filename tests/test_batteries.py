"""A battery is due when, and only when, what it proves something of has changed."""

import json
import re
from pathlib import Path

import pytest

from tests import batteries
from tests.batteries import BATTERIES, ROOT, Battery

MODULE = '''"""A module."""

# A comment.
def double(value):
    """Twice."""
    return 2 * value  # why


NAME = """# a string
is no comment"""
'''


def test_every_mark_names_a_battery_that_has_the_file():
    marked = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        names = re.findall(r'battery\(name="(\w+)"\)', text)
        names += re.findall(r'members\(\s*"(\w+)"', text)
        marked |= {(name, path.relative_to(ROOT).as_posix()) for name in names}
    declared = {(one.name, file) for one in BATTERIES for file in one.files}
    assert marked == declared


@pytest.mark.parametrize("one", BATTERIES, ids=lambda one: one.name)
def test_sources_are_there(one: Battery):
    sources = {path.relative_to(ROOT).as_posix() for path in one.sources()}
    assert set(one.files) <= sources
    assert any(source.startswith(("kernels/", "jaxspec/")) for source in sources)
    for place in one.reads:
        assert any(source.startswith(place) for source in sources), place
    for glob in one.data:
        # Tunings are there once a device has been tuned for.
        assert "tuned" in glob or list(ROOT.glob(glob)), glob


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Battery:
    """A battery in a repository of its own."""
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
    monkeypatch.setattr(batteries, "ROOT", tmp_path)
    monkeypatch.setattr(batteries, "RECORD", tmp_path / "batteries.json")
    return Battery(
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
def test_what_makes_it_due(one: Battery, file: str, *, is_read: bool):
    record = {"one": {"digest": one.digest()}}
    batteries.RECORD.write_text(json.dumps(record))
    assert not batteries.is_due(one)
    path = batteries.ROOT / file
    before = path.read_text()
    path.write_text(before + "# said\n" if path.suffix == ".py" else before)
    assert not batteries.is_due(one)
    path.write_text(before + "x = 2\n")
    assert batteries.is_due(one) == is_read
    path.write_text(before)
    assert not batteries.is_due(one)


def test_it_is_due_until_it_has_passed(one: Battery, monkeypatch: pytest.MonkeyPatch):
    assert batteries.is_due(one)
    test = batteries.ROOT / "tests" / "test_a.py"
    mark = f"import pytest\n\n\n@pytest.mark.battery(name={one.name!r})\n"
    mark += "def test_it():\n"
    monkeypatch.setattr(batteries, "ARGUMENTS", ("-q", "-p", "no:cacheprovider"))
    # Importing the plugins takes longer than everything else here.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    test.write_text(f"{mark}    raise ValueError\n")
    assert batteries.run(one, []) == 1
    assert batteries.is_due(one)
    test.write_text(f"{mark}    pass\n")
    assert batteries.run(one, ["-rs"]) == 0
    assert batteries.is_due(one), "arguments may leave tests out"
    test.write_text(f"{mark}    pytest.skip('no compiler')\n")
    assert batteries.run(one, []) == 0
    assert batteries.is_due(one), "nothing has been proven"
    test.write_text(f"{mark}    pass\n")
    assert batteries.run(one, []) == 0
    assert not batteries.is_due(one)
    assert batteries.recorded()["one"]["digest"] == one.digest()


def test_code_is_what_is_left_without_what_is_said():
    assert batteries.code_of(MODULE) == (
        "def double(value):\n    return 2 * value\n"
        'NAME = """# a string\nis no comment"""'
    )


@pytest.mark.parametrize(
    ("name", "is_due"), [("page_writes", True), ("attention_calls", False)]
)
def test_another_compiler_makes_due_what_it_compiles(name, is_due, monkeypatch):
    (one,) = (one for one in BATTERIES if one.name == name)
    before = one.digest()
    monkeypatch.setattr(batteries, "_compiler_versions", lambda: ["libtpu 9.9"])
    assert (one.digest() != before) == is_due
