"""The README of the kernels: its examples run, and the files it names exist."""

import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")
EXAMPLES = dict(
    re.findall(r"<!-- example: (\w+) -->\n```python\n(.*?)```", README, re.DOTALL)
)


def run(name: str) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(compile(EXAMPLES[name], f"kernels/README.md, {name}", "exec"), names)
    return names


def test_every_example_is_run():
    assert set(EXAMPLES) == {"attention", "sampling"}
    assert README.count("```python") == len(EXAMPLES)


def test_attention_example_equals_float64():
    found = run("attention")
    key, value, query, mixed = (
        np.asarray(found[name], np.float64)
        for name in ("key", "value", "query", "mixed")
    )
    for token, head in np.ndindex(3, 8):
        keys = key[: 38 + token, head // 4]
        scores = 50 * np.tanh(keys @ query[0, token, head] / 8 / 50)
        weights = np.exp(scores - scores.max())
        truth = weights @ value[: 38 + token, head // 4] / weights.sum()
        np.testing.assert_allclose(mixed[0, token, head], truth, atol=1e-5)
    np.testing.assert_array_equal(mixed[1], 0)  # its pages hold zeros


@pytest.mark.slow
def test_sampling_example_emits_tokens_of_the_vocabulary():
    found = run("sampling")
    emitted = found["emitted"]
    assert isinstance(emitted, list)
    assert 1 <= len(emitted) <= 5
    assert all(0 <= token < 1000 for token in emitted)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w/*.]+\.py)`", README))))
def test_every_named_file_exists(path):
    folders = (
        ROOT / "kernels/jaxspec_kernels",
        ROOT / "kernels/jaxspec_kernels/paged_attention",
        ROOT / "tests/kernels",
        ROOT,
    )
    assert any(list(folder.glob(path)) for folder in folders), path
