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


def parameters(name: str) -> list[Any]:
    """Every case of a file for each of its models, grouped by model."""
    cases = golden.read_cases(name)
    models = dict.fromkeys(model for case in cases for model in case["models"])
    found = []
    for model in models:
        own = [case for case in cases if model in case["models"]]
        for index, case in enumerate(own):
            label = f"{model}-{case['kind']}-{index}"
            marks = [] if case["kind"] in QUICK else [pytest.mark.slow]
            found.append(pytest.param(model, case, id=label, marks=marks))
    return found


def cases_of(name: str, model: str) -> list[Case]:
    return [case for case in golden.read_cases(name) if model in case["models"]]


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
def test_published_outputs(real: GoldenModel, case: Case) -> None:
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
    golden.CHECKS[case["kind"]](bundled, case)


@pytest.mark.parametrize(
    ("bundled", "case"), parameters("bundled"), indirect=["bundled"], scope="module"
)
def test_every_comparison_can_fail(bundled: GoldenModel, case: Case) -> None:
    for change in CHANGES[case["kind"]]:
        changed: Any = copy.deepcopy(case)
        change(changed)
        assert changed != case
        with pytest.raises(AssertionError):
            golden.CHECKS[case["kind"]](bundled, changed)


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
            changed: Any = dict(case)
            _change_only_the_margin(changed)
            with pytest.raises(AssertionError, match="the published text has token"):
                golden.CHECKS["greedy"](model, changed)
    model.shutdown()


def _scale_last_column(case: Any) -> None:
    case["prompts"][-1]["last"][-1][-1] *= 1.02


def _scale_first_column(case: Any) -> None:
    case["prompts"][0]["first"][0][0] *= 1.02


def _move_a_logit(case: Any) -> None:
    case["prompts"][-1]["logits"][-1][1] += 2 * case["atol"]["float32"]


def _move_the_first_logit(case: Any) -> None:
    case["prompts"][0]["logits"][0][0] -= 2 * case["atol"]["float32"]


def _change_a_token(case: Any) -> None:
    case["prompts"][0]["tokens"][1] += 1


def _change_the_prompt(case: Any) -> None:
    case["prompts"][-1]["prompt"] += " then"


def _change_the_last_word(case: Any) -> None:
    case["text"] = case["text"].rpartition(" ")[0] + " dragon"


def _change_only_the_exact_text(case: Any) -> None:
    """Change a case so that only the comparison of the engine's text can fail.

    The margin is so large that any token passes.
    """
    _change_the_last_word(case)
    case["margin"] = 100.0


def _change_only_the_margin(case: Any) -> None:
    """Change a case so that only the comparison with the margin can fail.

    The engine's text is not compared.
    """
    _change_the_last_word(case)
    case["exact_in"] = []


def _lengthen(case: Any) -> None:
    case["num_tokens"] += 1


def _raise_bits(case: Any) -> None:
    case["bits_per_byte"] += 2 * case["tolerance"]


def _lower_bits(case: Any) -> None:
    case["bits_per_byte"] -= 2 * case["tolerance"]


def _ask_for_more(case: Any) -> None:
    (question,) = case["contains"]
    case["contains"][question] += " No."


def _change_an_id(case: Any) -> None:
    case["ids_of"]["This is a test"][-1] += 1


def _change_a_letter(case: Any) -> None:
    case["texts"][-1]["text"] += "s"


CHANGES: dict[str, list[Callable[[Any], None]]] = {
    "answers": [_ask_for_more],
    "cross_entropy": [_raise_bits, _lower_bits],
    "decode": [_change_a_letter],
    "embeddings": [_scale_first_column, _scale_last_column, _change_a_token],
    "encode": [_change_an_id],
    "greedy": [_change_only_the_margin, _change_only_the_exact_text, _lengthen],
    "logits": [
        _move_a_logit,
        _move_the_first_logit,
        _change_a_token,
        _change_the_prompt,
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
        + [f"{__file__}::test_published_outputs", "-k", "encode or decode"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {golden.VARIABLE: str(tmp_path)},
        check=False,
    )
    assert "2 failed, 10 skipped" in done.stdout.splitlines()[-1], done.stdout
    assert "has no gemma-2-27b-it" in done.stdout
