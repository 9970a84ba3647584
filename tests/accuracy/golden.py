"""Published outputs of real weights: the kinds of cases, and their comparisons.

A golden file is a list of cases. Each names its models, the source of its values, and a
kind, which is a key of `CHECKS`. One file has the published values of Gemma 2.
"""

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxspec import LLM, SamplingParams
from jaxspec.text.tokenizer import Tokenizer
from jaxspec_checkpoints import open_checkpoint
from tests.support.oracles import PagedModel

FOLDER = Path(__file__).parent / "golden"
VARIABLE = "JAXSPEC_GEMMA2_DIR"

PAGE_SIZE = 16
# Tokens in one pass over a long text: few enough to hold their logits. All passes have
# this size, so that the network is compiled once.
CHUNK = 64
# Memory that a model needs, as a multiple of its weights: pages, activations and the
# logits of a chunk come on top.
ROOM = 1.3
# Additional tolerance for the difference of two logits in bfloat16.
BFLOAT16_MARGIN = 0.5

Case = Mapping[str, Any]


def read_cases(name: str) -> list[Case]:
    """Return the cases of a file in `golden/`."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["cases"]


def model_folder(root: Path, name: str) -> Path | None:
    """Find a model below the folder that `VARIABLE` names.

    Raises:
        ValueError: `root` is not a folder, or no folder in it is a Gemma 2.
    """
    if not root.is_dir() or not any(root.glob("gemma-2-*/")):
        raise ValueError(
            f"{VARIABLE}={root} must be a folder with models in folders named "
            "gemma-2-2b, gemma-2-9b-it and so on"
        )
    return root / name if (root / name).is_dir() else None


def memory_bytes() -> int:
    """Return the memory of all devices; on a CPU, the machine's."""
    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return sum(device.memory_stats()["bytes_limit"] for device in devices)


def choose_dtype(num_parameters: int, available: int) -> str:
    """Return float32 if it fits, for its tighter bounds, else bfloat16."""
    return "float32" if 4 * num_parameters * ROOM <= available else "bfloat16"


class GoldenModel:
    """One model, loaded when a case first needs it, as an engine and as a network."""

    def __init__(self, folder: Path, cases: Sequence[Case], dtype: str | None = None):
        self.folder, self.cases = folder, cases
        self.checkpoint = open_checkpoint(folder)
        parameters = self.checkpoint.num_parameters
        self.dtype = dtype or choose_dtype(parameters, memory_bytes())

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self.checkpoint.tokenizer_folder)

    @functools.cached_property
    def max_tokens(self) -> int:
        """Length of the longest text of any case."""
        lengths = [
            len(self.tokenizer.encode(prompt_of(case))) + case["num_tokens"]
            for case in self.cases
            if case["kind"] == "greedy"
        ]
        return max([*lengths, 4 * CHUNK])

    @functools.cached_property
    def llm(self) -> LLM:
        num_devices = 1 if jax.default_backend() == "cpu" else jax.device_count()
        return LLM(
            str(self.folder),
            dtype=self.dtype,
            tensor_parallel_size=num_devices,
            max_num_seqs=1,
            max_model_len=self.max_tokens,
            block_size=PAGE_SIZE,
            num_gpu_blocks_override=self.num_pages,
        )

    @property
    def num_pages(self) -> int:
        return -(-self.max_tokens // PAGE_SIZE) + 1

    @functools.cached_property
    def paged(self) -> PagedModel:
        """The network with the same parameters, for logits, which `LLM` lacks."""
        engine = self.llm.llm_engine
        return PagedModel(
            engine.config.model_config,
            engine.runner.params[0],
            page_size=PAGE_SIZE,
            num_pages=self.num_pages,
        )

    def logits(self, tokens: Sequence[int], first: int = 0) -> np.ndarray:
        """Return logits of position `first` and all after it, `[token, vocab]`."""
        # The length hides the keys of an earlier text: they are still in the pages.
        self.paged.length = 0
        return logits_of(self.paged, tokens, first, chunk=CHUNK)

    def shutdown(self) -> None:
        """Free the device's memory."""
        if "llm" in vars(self):
            self.llm.llm_engine.shutdown()
        for name in ("paged", "llm"):
            vars(self).pop(name, None)


def logits_of(
    paged: PagedModel, tokens: Sequence[int], first: int, *, chunk: int
) -> np.ndarray:
    """Return logits of position `first` and all after it, computed in chunks."""
    kept = []
    for start in range(0, len(tokens), chunk):
        piece = np.asarray(tokens[start : start + chunk])
        rows = paged.run(piece, pads=chunk - len(piece))
        kept.append(rows[max(0, first - start) :])
    return np.concatenate(kept)


def losses_of(logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """Return the negative log-likelihood of the token after each row, in nats."""
    logits = logits.astype(np.float64)
    highest = logits.max(axis=1)
    log_sum = np.log(np.exp(logits - highest[:, None]).sum(axis=1)) + highest
    return log_sum - logits[np.arange(len(tokens)), tokens]


def prompt_of(case: Case) -> str:
    """Return the prompt of a greedy case; long ones are stored as repetitions."""
    return case.get("prefix", "") * case.get("num_prefixes", 0) + case["prompt"]


def check_embeddings(model: GoldenModel, case: Case) -> None:
    """Compare the scaled embedding rows of tokens, without running the model."""
    table = model.checkpoint.tensors["model.embed_tokens.weight"]
    scale = ml_dtypes.bfloat16(table.shape[1] ** 0.5)
    for prompt in case["prompts"]:
        rows = [table.read(token, token + 1)[0] for token in prompt["tokens"]]
        found = np.stack(rows).astype(np.float32) * np.float32(scale)
        width = len(prompt["first"][0])
        for part, name in ((found[:, :width], "first"), (found[:, -width:], "last")):
            np.testing.assert_allclose(
                part, prompt[name], rtol=case["rtol"], err_msg=prompt["prompt"]
            )


def check_logits(model: GoldenModel, case: Case) -> None:
    for prompt in case["prompts"]:
        assert model.tokenizer.encode(prompt["prompt"]) == prompt["tokens"]
        found = model.logits(prompt["tokens"])[:, case["ids"]]
        np.testing.assert_allclose(
            found,
            prompt["logits"],
            rtol=0,
            atol=case["atol"][model.dtype],
            err_msg=prompt["prompt"],
        )


def check_greedy(model: GoldenModel, case: Case) -> None:
    """Check that each token has the best logit, or one within `margin` of it.

    With a dtype in the case's `exact_in`, the engine must also generate exactly this
    text.
    """
    prompt = model.tokenizer.encode(prompt_of(case))
    whole = model.tokenizer.encode(prompt_of(case) + case["text"])
    assert whole[: len(prompt)] == prompt, "prompt and text share a token"
    said = whole[len(prompt) :]
    logits = model.logits(whole[:-1], first=len(prompt) - 1)
    missing = logits.max(axis=1) - logits[np.arange(len(said)), said]
    worst = int(missing.argmax())
    allowed = case["margin"] + (BFLOAT16_MARGIN if model.dtype == "bfloat16" else 0)
    text_before = model.tokenizer.decode(said[:worst])
    assert missing[worst] <= allowed, (
        f"after {text_before!r} the published text has token {said[worst]}; ours would "
        f"be {int(logits[worst].argmax())}, by {missing[worst]:.3f}, and {allowed} is "
        "allowed"
    )
    if model.dtype in case["exact_in"]:
        params = SamplingParams(
            temperature=0, max_tokens=case["num_tokens"], ignore_eos=True
        )
        ids: Any = {"prompt_token_ids": prompt}
        (output,) = model.llm.generate(ids, params, use_tqdm=False)
        assert output.outputs[0].text == case["text"]


def check_cross_entropy(model: GoldenModel, case: Case) -> None:
    tokens = model.tokenizer.encode(case["text"])
    logits = model.logits(tokens[:-1])
    bits = losses_of(logits, tokens[1:]).sum() / np.log(2) + np.log2(logits.shape[1])
    found = bits / len(case["text"].encode())
    assert abs(found - case["bits_per_byte"]) <= case["tolerance"], found


def check_answers(model: GoldenModel, case: Case) -> None:
    params = SamplingParams(temperature=0, max_tokens=case["num_tokens"])
    wrong = {}
    for question, expected in case["contains"].items():
        messages = [{"role": "user", "content": question}]
        (output,) = model.llm.chat(messages, params, use_tqdm=False)
        if expected not in output.outputs[0].text:
            wrong[question] = (expected, output.outputs[0].text)
    assert not wrong, wrong


def check_encode(model: GoldenModel, case: Case) -> None:
    found = {text: model.tokenizer.encode(text) for text in case["ids_of"]}
    assert found == case["ids_of"]


def check_decode(model: GoldenModel, case: Case) -> None:
    found = [
        dict(each, text=model.tokenizer.decode(each["ids"])) for each in case["texts"]
    ]
    assert found == case["texts"]


CHECKS: dict[str, Callable[[GoldenModel, Case], None]] = {
    "answers": check_answers,
    "cross_entropy": check_cross_entropy,
    "decode": check_decode,
    "embeddings": check_embeddings,
    "encode": check_encode,
    "greedy": check_greedy,
    "logits": check_logits,
}
