"""Texts of models with an untied LM head equal HuggingFace's, also with drafts."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from jaxspec import LLM, SamplingParams
from jaxspec.engine import loader
from jaxspec.models.heads.config import EagleConfig, MedusaConfig
from jaxspec.models.matrices import DenseMatrix
from jaxspec.program.propose.eagle import Eagle
from jaxspec.program.propose.medusa import Medusa
from jaxspec_checkpoints import open_checkpoint
from jaxspec_checkpoints.layout import HEAD, TIE
from jaxspec_checkpoints.writing import write_checkpoint
from tests.support.engines import QuickGreedyRunner
from tests.support.oracles import hf_logits, make_hf_model
from tests.train.tiny import HIDDEN, LAYER, VOCAB

pytestmark = pytest.mark.usefixtures("quick")
LENGTH, PROMPTS = 16, [[2, 5, 6, 7], [2, 9], [2, *range(20, 40)]]
PARAMS = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(loader, "Runner", QuickGreedyRunner)


@functools.cache
def reference() -> Any:
    return make_hf_model(seed=2, num_hidden_layers=2, tie_word_embeddings=False)


def write(folder: Path, model: Any, said: bool | None, *, to: str = "hf") -> Path:
    """Write a model whose config.json says tied, untied or, with None, neither."""
    source = folder.with_name(f"{folder.name}-source") if to != "hf" else folder
    model.save_pretrained(source)
    assert HEAD in load_file(source / "model.safetensors")
    path = source / "config.json"
    config = json.loads(path.read_text())
    config.pop(TIE, None)
    path.write_text(json.dumps(config | ({} if said is None else {TIE: said})))
    if to != "hf":
        write_checkpoint(open_checkpoint(source), folder, to=to, progress=False)
    return folder


def draft_model() -> Any:
    """Return the target with noise in its LM head: a draft that is often right."""
    model = make_hf_model(seed=2, num_hidden_layers=2, tie_word_embeddings=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        weight = model.lm_head.weight
        noise = torch.randn(weight.shape, generator=generator)
        weight.add_(0.3 * weight.std() * noise)
    return model


def expected(prompt: list[int]) -> list[int]:
    known = list(prompt)
    for _ in range(LENGTH):
        known.append(int(hf_logits(reference(), np.array(known))[-1].argmax()))
    return known[len(prompt) :]


def texts(folder: Path, **options: Any) -> tuple[list[list[int]], float]:
    given: dict[str, Any] = dict(
        dtype="float32", max_model_len=64, max_num_seqs=4, skip_tokenizer_init=True
    )
    with LLM(str(folder), **given | options) as llm:
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        found = llm.generate(prompts, PARAMS, use_tqdm=False)
        rate = llm.llm_engine.stats.acceptance_rate
    return [list(one.outputs[0].token_ids) for one in found], rate


@pytest.mark.parametrize(
    ("said", "to"), [(True, "hf"), (None, "hf"), (False, "hf"), (True, "orbax")]
)
def test_greedy_text_equals_huggingface_for_any_config(tmp_path, said, to):
    folder = write(tmp_path / "model", reference(), said, to=to)
    found, _ = texts(folder)
    assert found == [expected(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="whole"),
        pytest.param(
            dict(scan_layers=True, tensor_parallel_size=2),
            id="scanned and spread",
            marks=pytest.mark.slow,
        ),
        pytest.param(dict(draft_vocab_size=48), id="trimmed", marks=pytest.mark.slow),
    ],
)
def test_greedy_text_with_untied_drafts_equals_plain(tmp_path, options):
    target = write(tmp_path / "target", reference(), True)
    draft = write(tmp_path / "draft", draft_model(), True)
    kept = options.pop("draft_vocab_size", None)
    said: dict[str, Any] = dict(
        model=str(draft), num_speculative_tokens=3, controller="fixed"
    )
    if kept is not None:
        path = tmp_path / "map.json"
        path.write_text(json.dumps(list(range(96))))
        said |= dict(draft_vocab_size=kept, draft_token_map=str(path))
    found, rate = texts(target, speculative_config=said, **options)
    assert found == [expected(prompt) for prompt in PROMPTS]
    assert 0.1 < rate < 1


def test_head_that_copies_the_embedding_takes_no_memory(tmp_path):
    model = make_hf_model(seed=2, num_hidden_layers=2)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    plain, _ = texts(tmp_path)
    save_file(tensors | {HEAD: tensors["model.embed_tokens.weight"]}, path)
    with LLM(
        str(tmp_path), dtype="float32", max_model_len=64, skip_tokenizer_init=True
    ) as llm:
        assert "head" not in llm.llm_engine.runner.params[0]
    assert texts(tmp_path)[0] == plain


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_draft_heads_use_the_lm_head_of_the_target(kind, is_tied):
    """A head uses the target's LM head, which is its embedding only if tied."""
    random = np.random.default_rng(0)
    matrices = random.normal(size=(2, VOCAB, HIDDEN)).astype(np.float32)
    target = {"embedding": DenseMatrix(jnp.asarray(matrices[0]))}
    if not is_tied:
        target["head"] = DenseMatrix(jnp.asarray(matrices[1]))
    context: Any = SimpleNamespace(
        target=target, pool=SimpleNamespace(vocab_size=VOCAB)
    )
    rows = random.normal(size=(3, HIDDEN)).astype(np.float32)
    if kind == "eagle":
        config = EagleConfig(**LAYER, draft_vocab_size=VOCAB)
        eagle = Eagle(config=config, target_layers=(-1,), drafts_argmax=True)
        found = eagle._logits({}, jnp.asarray(rows), context)
    else:
        config = MedusaConfig(
            target_hidden_size=HIDDEN,
            vocab_size=VOCAB,
            draft_vocab_size=VOCAB,
            num_heads=1,
            num_blocks=1,
        )
        medusa = Medusa(config=config)
        found = medusa._logits({}, jnp.asarray(rows)[None], context)(0)
    wanted = rows @ matrices[0 if is_tied else 1].T
    np.testing.assert_allclose(np.asarray(found), wanted, atol=1e-4)
