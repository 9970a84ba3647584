"""Published outputs of the real Gemma 2 weights, if JAXSPEC_GEMMA2_DIR has them.

Set it to a folder with `gemma-2-2b`, `gemma-2-9b-it` and so on, each in any format:

    JAXSPEC_GEMMA2_DIR=/models python -m pytest tests/accuracy/test_golden.py

Without it the same comparisons run on the bundled pair, with HuggingFace's values, and
a test shows that every comparison can fail.
"""

import copy
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from jaxspec_checkpoints import bundled_draft, bundled_target
from tests.accuracy import golden
from tests.accuracy.golden import Case, GoldenModel

ROOT = Path(__file__).parents[2]
BUNDLED: dict[str, Callable[[], Path]] = {
    "target": bundled_target,
    "draft": bundled_draft,
}
PUBLISHED = golden.read_cases("published")
PROMPTS = ("I love to", "Once upon a time, there was")
TEXT = "The capital of Hungary is Budapest which is located in Europe."
QUESTION = "Tell me a short story about a dragon."
TURN = f"<start_of_turn>user\n{QUESTION}<end_of_turn>\n<start_of_turn>model\n"
TEXTS = (
    *("This is a test", "", " ", "  ", "Hi  Hello", " Hello", "生活的真谛是"),
    *("A dragon, 1066 and 3.5!", "naïve\n\n\tcafé 🐉"),
)
IDS = ([869], [4000, 869], [2000, 3000, 5000])
GREEDY: dict[str, Any] = dict(
    kind="greedy", prompt=PROMPTS[1], num_tokens=24, exact_in=["float32"], margin=1e-3
)
# Longer than the window of 128.
LONG = GREEDY | dict(prompt="In the morning", num_prefixes=20)
LONG |= dict(prefix="The sun was warm and the sky was blue. ")
Change = tuple[str, Any]  # path of an entry, and its new value or a function of the old


def cases_of(model: str) -> list[Case]:
    return [case for case in PUBLISHED if model in case["models"]]


def marks_of(kind: str) -> Any:
    """Mark as slow what needs more than the checkpoint and the tokenizer."""
    return [] if kind in ("embeddings", "encode", "decode") else [pytest.mark.slow]


def published() -> list[Any]:
    """Return every published case for each of its models, grouped by model."""
    models = [model for case in PUBLISHED for model in case["models"]]
    return [
        pytest.param(
            model, case, id=f"{model}-{case['kind']}-{i}", marks=marks_of(case["kind"])
        )
        for model in dict.fromkeys(models)
        for i, case in enumerate(cases_of(model))
    ]


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest) -> Iterator[GoldenModel]:
    """Yield one model at a time: pytest runs all cases of a model before the next."""
    name, root = request.param, os.environ.get(golden.VARIABLE)
    if root is None:
        pytest.skip(f"{golden.VARIABLE} names no folder with real weights")
    folder = golden.model_folder(Path(root), name)
    if folder is None:
        pytest.skip(f"{golden.VARIABLE}={root} has no {name}")
    model = GoldenModel(folder, cases_of(name))
    yield model
    model.shutdown()


@pytest.mark.parametrize(
    ("real", "case"), published(), indirect=["real"], scope="module"
)
def test_published_outputs_are_reproduced(real: GoldenModel, case: Case) -> None:
    golden.CHECKS[case["kind"]](real, case)


class Reference:
    """One model of the pair in transformers, and its values as golden cases."""

    def __init__(self, folder: Path):
        self.model: Any = transformers.Gemma2ForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self.encode, self.decode = tokenizer.encode, tokenizer.decode

    def logits(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0].double()

    def continuation(self, text: str, *, ignore_eos: bool = True) -> str:
        """Generate greedily, without a KV cache."""
        prompt = self.encode(text)
        known = list(prompt)
        while len(known) < len(prompt) + GREEDY["num_tokens"]:
            known.append(int(self.logits(known)[-1].argmax()))
            if not ignore_eos and known[-1] in (1, 107):
                break
        return self.decode(known[len(prompt) :], skip_special_tokens=True)

    def bits_per_byte(self, text: str) -> float:
        ids = self.encode(text)
        rows = self.logits(ids[:-1]).log_softmax(-1)
        nats = -rows[torch.arange(len(ids) - 1), ids[1:]].sum()
        bits = float(nats) / np.log(2) + np.log2(self.model.config.vocab_size)
        return bits / len(text.encode())

    @functools.cached_property
    def values(self) -> list[dict[str, Any]]:
        """Embeddings, logits and token ids, which need one pass or none."""
        scale = torch.tensor(self.model.config.hidden_size**0.5).bfloat16()
        table = self.model.model.embed_tokens.weight.detach().bfloat16() * scale
        embeddings, logits = [], []
        for prompt in PROMPTS:
            ids = self.encode(prompt)
            each, rows = {"prompt": prompt, "tokens": ids}, table[ids]
            ends = {"first": rows[:, :3].tolist(), "last": rows[:, -3:].tolist()}
            embeddings.append(each | ends)
            logits.append(each | {"logits": self.logits(ids)[:, :3].tolist()})
        bits = dict(text=TEXT, bits_per_byte=self.bits_per_byte(TEXT))
        bounds = dict(ids=[0, 1, 2], atol={"float32": 1e-3, "bfloat16": 0.5})
        texts = [{"ids": ids, "text": self.decode(ids)} for ids in IDS]
        return [
            dict(kind="embeddings", rtol=2**-7, prompts=embeddings),
            dict(kind="logits", prompts=logits, **bounds),
            dict(kind="cross_entropy", tolerance=1e-4, **bits),
            dict(kind="encode", ids_of={text: self.encode(text) for text in TEXTS}),
            dict(kind="decode", texts=texts),
        ]

    @functools.cached_property
    def texts(self) -> list[dict[str, Any]]:
        """Greedy continuations of prompts, and an answer."""
        cases = [
            case | {"text": self.continuation(golden.prompt_of(case))}
            for case in (GREEDY, LONG)
        ]
        answer = self.continuation(TURN, ignore_eos=False)
        contains = dict(num_tokens=GREEDY["num_tokens"], contains={QUESTION: answer})
        return [*cases, dict(kind="answers", **contains)]


@functools.cache
def bundled(name: str) -> tuple[GoldenModel, Reference]:
    model = GoldenModel(BUNDLED[name](), [GREEDY, LONG], dtype="float32")
    return model, Reference(BUNDLED[name]())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=marks_of(kind))
        for name in BUNDLED
        for kind in golden.CHECKS
        # Only for one of the two models, because compiling an engine takes long.
        if name == "target" or kind not in ("greedy", "answers")
    ],
)
def test_outputs_of_the_bundled_pair_equal_huggingface(name: str, kind: str) -> None:
    """Every comparison passes, and fails after every change of the case."""
    model, reference = bundled(name)
    cases = reference.texts if kind in ("greedy", "answers") else reference.values
    cases = [case for case in cases if case["kind"] == kind]
    assert len(cases) == (2 if kind == "greedy" else 1)
    for case in cases:
        golden.CHECKS[kind](model, case)
        for change in CHANGES[kind]:
            with pytest.raises(AssertionError):
                golden.CHECKS[kind](model, changed(case, *change))


@pytest.mark.slow
def test_bfloat16_has_its_own_bounds() -> None:
    """Check that in bfloat16 texts may differ within the larger margin only.

    No other token may be better by more than the margin.
    """
    _, reference = bundled("target")
    model = GoldenModel(bundled_target(), [GREEDY, LONG], dtype="bfloat16")
    for case in (*reference.values, *reference.texts):
        if case["kind"] in ("greedy", "logits"):
            golden.CHECKS[case["kind"]](model, case)
        if case["kind"] == "greedy":
            other = changed(case, *CHANGES["greedy"][0])
            with pytest.raises(AssertionError, match="the published text has token"):
                golden.CHECKS["greedy"](model, other)
    model.shutdown()


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


def test_published_cases_are_complete() -> None:
    """Every case has a known kind, existing models, and a source."""
    assert {case["kind"] for case in PUBLISHED} == set(golden.CHECKS) == set(CHANGES)
    assert all(case["source"] and case["models"] for case in PUBLISHED)
    sizes = [f"gemma-2-{size}" for size in ("2b", "9b", "27b")]
    expected = {*sizes, *(f"{size}-it" for size in sizes)}
    assert {model for case in PUBLISHED for model in case["models"]} == expected


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
