"""`--plot`: what is refused before anything runs, and files of every kind."""

import importlib
import sys

import pytest

from jaxspec.bench.plot import SUFFIXES, check_plot, plot
from jaxspec.errors import ConfigError
from tests.bench.results import run_result

BEGINNINGS = {".pdf": b"%PDF", ".png": b"\x89PNG", ".svg": b"<?xml"}


def test_files_that_can_be_drawn(tmp_path):
    check_plot(None)
    for suffix in (*SUFFIXES, ".SVG"):
        check_plot(tmp_path / f"new{suffix}")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("new.jpg", r"--plot must be a file that ends in one of .pdf, .png, .svg, got"),
        ("new", "--plot must be a file that ends in"),
        ("none/new.svg", "--plot must be a file in a folder that can be written to"),
    ],
)
def test_files_that_cannot(name, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        check_plot(tmp_path / name)


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "a.svg").mkdir()
    with pytest.raises(ConfigError, match="--plot must be a file"):
        check_plot(tmp_path / "a.svg")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    for name in [one for one in sys.modules if one.startswith("jaxspec.bench.figures")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r'--plot needs .* -e "\.\[bench\]"'):
        check_plot(tmp_path / "new.svg")
    check_plot(None)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_result_is_drawn_as_the_suffix_says(suffix, tmp_path, capsys):
    path = tmp_path / f"new{suffix}"
    plot(run_result("latency"), path)
    assert path.read_bytes().startswith(BEGINNINGS[suffix])
    # The last line on stdout is the result.
    assert capsys.readouterr() == ("", f"Drawn: {path}\n")


def test_without_the_flag_nothing_is_imported(monkeypatch):
    monkeypatch.setattr(importlib, "import_module", None)
    plot(run_result("latency"), None)
