"""Published outputs of the real Gemma 2 weights, if JAXSPEC_GEMMA2_DIR has them.

Set it to a folder with `gemma-2-2b`, `gemma-2-9b-it` and so on, each in any format:

    JAXSPEC_GEMMA2_DIR=/models python -m pytest tests/accuracy/test_golden.py

Without it the same comparisons run on the bundled pair, with values recorded from
HuggingFace, and a test shows that every comparison can fail.
"""

import copy
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxspec_checkpoints import bundled_draft, bundled_target
from tests.accuracy import golden
from tests.accuracy.golden import Case, GoldenModel

ROOT = Path(__file__).parents[2]
BUNDLED: dict[str, Callable[[], Path]] = {
    "target": bundled_target,
    "draft": bundled_draft,
}
# These need only the checkpoint and the tokenizer.
QUICK = ("embeddings", "encode", "decode")


def cases_of(name: str, model: str) -> list[Case]:
    return [case for case in golden.read_cases(name) if model in case["models"]]


def parameters(name: str) -> list[Any]:
    """Return every case of a file for each of its models, grouped by model."""
    models = [model for case in golden.read_cases(name) for model in case["models"]]
    found = []
    for model in dict.fromkeys(models):
        for index, case in enumerate(cases_of(name, model)):
            label = f"{model}-{case['kind']}-{index}"
            marks = [] if case["kind"] in QUICK else [pytest.mark.slow]
            found.append(pytest.param(model, case, id=label, marks=marks))
    return found


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest) -> Iterator[GoldenModel]:
    """Yield one model at a time: pytest runs all cases of a model before the next."""
    name, root = request.param, os.environ.get(golden.VARIABLE)
    if root is None:
        pytest.skip(f"{golden.VARIABLE} names no folder with real weights")
    folder = golden.model_folder(Path(root), name)
    if folder is None:
        pytest.skip(f"{golden.VARIABLE}={root} has no {name}")
    model = GoldenModel(folder, cases_of("published", name))
    yield model
    model.shutdown()


@pytest.mark.parametrize(
    ("real", "case"), parameters("published"), indirect=["real"], scope="module"
)
def test_published_outputs_are_reproduced(real: GoldenModel, case: Case) -> None:
    golden.CHECKS[case["kind"]](real, case)


@functools.cache
def bundled_model(name: str) -> GoldenModel:
    return GoldenModel(BUNDLED[name](), cases_of("bundled", name), dtype="float32")


@pytest.fixture(scope="module")
def bundled(request: pytest.FixtureRequest) -> GoldenModel:
    return bundled_model(request.param)


@pytest.mark.parametrize(
    ("bundled", "case"), parameters("bundled"), indirect=["bundled"], scope="module"
)
def test_recorded_outputs_of_the_bundled_pair(bundled: GoldenModel, case: Case) -> None:
    """Every comparison passes, and fails after every change of the case."""
    check = golden.CHECKS[case["kind"]]
    check(bundled, case)
    for change in CHANGES[case["kind"]]:
        with pytest.raises(AssertionError):
            check(bundled, changed(case, *change))


@pytest.mark.slow
def test_bfloat16_has_its_own_bounds() -> None:
    """Check that in bfloat16 texts may differ within the larger margin only.

    No other token may be better by more than the margin.
    """
    cases = cases_of("bundled", "target")
    model = GoldenModel(bundled_target(), cases, dtype="bfloat16")
    for case in cases:
        if case["kind"] in ("greedy", "logits"):
            golden.CHECKS[case["kind"]](model, case)
        if case["kind"] == "greedy":
            other = changed(case, *CHANGES["greedy"][0])
            with pytest.raises(AssertionError, match="the published text has token"):
                golden.CHECKS["greedy"](model, other)
    model.shutdown()


Change = tuple[str, Any]  # path of an entry, and its new value or a function of the old


def changed(case: Case, *changes: Change) -> Case:
    """Return a copy of a case with other entries."""
    copied: Any = copy.deepcopy(case)
    for path, value in changes:
        *outer, last = [
            int(key) if key[-1].isdigit() else key for key in path.split("/")
        ]
        place = copied
        for key in outer:
            place = place[key]
        place[last] = value(place[last]) if callable(value) else value
    assert copied != case
    return copied


def _other_last_word(text: str) -> str:
    return text.rpartition(" ")[0] + " dragon"


# Lists of changes, after each of which a comparison must fail, by kind.
CHANGES: dict[str, list[list[Change]]] = {
    "answers": [
        [("contains", lambda one: {key: f"{text} No." for key, text in one.items()})]
    ],
    "cross_entropy": [
        [("bits_per_byte", lambda bits: bits + 2e-4)],
        [("bits_per_byte", lambda bits: bits - 2e-4)],
    ],
    "decode": [[("texts/-1/text", lambda text: text + "s")]],
    "embeddings": [
        [("prompts/0/first/0/0", lambda value: value * 1.02)],
        [("prompts/-1/last/-1/-1", lambda value: value * 1.02)],
        [("prompts/0/tokens/1", lambda token: token + 1)],
    ],
    "encode": [[("ids_of/This is a test/-1", lambda token: token + 1)]],
    "greedy": [
        # The engine's text is not compared, only the margin.
        [("text", _other_last_word), ("exact_in", [])],
        # Any token is within the margin, and only the engine's text can fail.
        [("text", _other_last_word), ("margin", 100.0)],
        [("num_tokens", lambda number: number + 1)],
    ],
    "logits": [
        [("prompts/-1/logits/-1/1", lambda value: value + 2e-3)],
        [("prompts/0/logits/0/0", lambda value: value - 2e-3)],
        [("prompts/0/tokens/1", lambda token: token + 1)],
        [("prompts/-1/prompt", lambda text: text + " then")],
    ],
}


@pytest.mark.parametrize("name", ["published", "bundled"])
def test_golden_files_are_complete(name: str) -> None:
    """Every case has a known kind, existing models, and a source."""
    cases = golden.read_cases(name)
    assert {case["kind"] for case in cases} == set(golden.CHECKS)
    assert all(case["source"] and case["models"] for case in cases)
    sizes = [f"gemma-2-{size}" for size in ("2b", "9b", "27b")]
    expected = [*sizes, *(f"{size}-it" for size in sizes)]
    named = {model for case in cases for model in case["models"]}
    assert named == set(expected if name == "published" else BUNDLED)


def test_folder_without_models_is_an_error(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match=r"gemma-2-2b.*gemma-2-9b-it"):
            golden.model_folder(root, "gemma-2-2b")
    (tmp_path / "gemma-2-9b").mkdir()
    assert golden.model_folder(tmp_path, "gemma-2-9b") == tmp_path / "gemma-2-9b"
    assert golden.model_folder(tmp_path, "gemma-2-2b") is None


def test_float32_is_chosen_if_it_fits() -> None:
    gigabyte = 10**9
    assert golden.choose_dtype(2_614_341_888, 16 * gigabyte) == "float32"
    assert golden.choose_dtype(9_241_705_984, 40 * gigabyte) == "bfloat16"
    assert golden.memory_bytes() > gigabyte


@pytest.mark.slow
def test_variable_enables_the_published_tests(tmp_path: Path) -> None:
    """Models under a wrong name fail, missing models are skipped.

    A folder that holds another model than its published name says makes its tests fail.
    Tests of models that the folder lacks are skipped.
    """
    (tmp_path / "gemma-2-2b-it").symlink_to(bundled_draft())
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
        + [
            f"{__file__}::test_published_outputs_are_reproduced",
            "-k",
            "encode or decode",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {golden.VARIABLE: str(tmp_path)},
        check=False,
    )
    assert "2 failed, 10 skipped" in done.stdout.splitlines()[-1], done.stdout
    assert "has no gemma-2-27b-it" in done.stdout
