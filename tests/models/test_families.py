"""A family needs one registry entry and one module: a second one loads and runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from jaxspec import LLM, SamplingParams
from jaxspec.engine import loader
from jaxspec.errors import ConfigError
from jaxspec.models.families import (
    FAMILIES,
    config_from_folder,
    config_from_hf,
    family_of,
    layouts,
)
from jaxspec.models.network import functions_of
from jaxspec_checkpoints import Sizes
from jaxspec_checkpoints.reading import LAYOUTS
from tests.models import llama
from tests.support.engines import QuickGreedyRunner
from tests.support.oracles import make_gemma3

SIZES: dict[str, Any] = dict(vocab_size=96, hidden_size=48, intermediate_size=64)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=12)
SIZES |= dict(pad_token_id=0, bos_token_id=2, eos_token_id=1)
SIZES |= dict(max_position_embeddings=128, tie_word_embeddings=False)


def write_llama(folder: Path, num_layers: int) -> Any:
    """Write a random HuggingFace Llama with sharp distributions."""
    torch.manual_seed(num_layers)
    config = LlamaConfig(**SIZES, num_hidden_layers=num_layers)
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for value in model.parameters():
            scale = 3.0 / value.shape[-1] ** 0.5 if value.ndim == 2 else 0.3
            value.copy_(torch.randn_like(value) * scale + (value.ndim == 1))
    model.save_pretrained(folder)
    return model


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.fixture
def has_llama(monkeypatch):
    monkeypatch.setitem(FAMILIES, "llama", llama.FAMILY)


def make_llamas(folder: Path) -> Any:
    write_llama(folder / "draft", num_layers=1)
    return write_llama(folder / "target", num_layers=2)


def make_gemmas(folder: Path) -> Any:
    """Write models whose windows are shorter than prompts and texts."""
    make_gemma3(2, num_hidden_layers=3).save_pretrained(folder / "draft")
    reference = make_gemma3(1)
    reference.save_pretrained(folder / "target")
    return reference


@pytest.mark.usefixtures("has_llama")
@pytest.mark.parametrize(
    "scan_layers", [False, pytest.param(True, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("make", "num_draft_tokens", "count", "prompts"),
    [
        (make_llamas, 2, 12, [[2, 17, 40], [2, 9, 3, 88, 61, 5]]),
        pytest.param(
            *(make_gemmas, 3, 24, [[2, 17, 40] * 8, [2, 9, 3, 88, 61, 5]]),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_family_equals_huggingface_in_the_engine(
    tmp_path, monkeypatch, make, num_draft_tokens, count, prompts, scan_layers
):
    """Target and draft model are loaded from folders."""
    monkeypatch.setattr(loader, "Runner", QuickGreedyRunner)
    reference = make(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    with LLM(
        str(tmp_path / "target"),
        speculative_model=str(tmp_path / "draft"),
        num_speculative_tokens=num_draft_tokens,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=96,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        scan_layers=scan_layers,
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = greedy(reference, prompt, count)
        assert output.outputs[0].token_ids == expected
        assert len(set(expected)) > 4


def test_second_family_is_read_by_its_own_module(tmp_path, request):
    write_llama(tmp_path / "one", num_layers=1)
    supported = "'gemma3', which are the supported architectures"
    with pytest.raises(ConfigError, match=f"'gemma2', .*{supported}, got 'llama'"):
        config_from_folder(tmp_path / "one")
    request.getfixturevalue("has_llama")
    config = config_from_folder(tmp_path / "one")
    assert type(config) is llama.LlamaConfig
    assert functions_of(config) is llama
    tensors = llama.tensor_shapes(Sizes.from_config(dict(SIZES, num_hidden_layers=1)))
    declared = llama.param_specs(config).values()
    assert sorted(tensors) == sorted(name for one in declared for name in one.tensors)
    expected = "'gemma3', 'llama', which are the supported architectures, got 'x'"
    with pytest.raises(ConfigError, match=expected):
        config_from_hf({"model_type": "x"})


def test_checkpoint_tools_read_every_family():
    """The tools are a separate package with its own list of families."""
    assert layouts() == LAYOUTS


@pytest.mark.parametrize(
    ("model_type", "tensors_of_layer", "num_layers"),
    [
        ("gemma2", 11, {"2b": 26, "9b": 42, "27b": 46}),
        ("gemma3_text", 13, {"270m": 18, "1b": 26, "4b": 34, "12b": 48, "27b": 62}),
    ],
)
def test_declared_tensors_match_the_layout(model_type, tensors_of_layer, num_layers):
    """Parameters use every tensor of a checkpoint, for every published size."""
    family: Any = FAMILIES[model_type]
    names = {size: tensors_of_layer * count + 2 for size, count in num_layers.items()}
    assert family.layout.published.keys() == names.keys()
    for size, count in names.items():
        config = config_from_hf(family.layout.flax.config(size))
        assert family_of(config) is family
        sizes = family.layout.published[size]
        assert family.layout.published_name(sizes) == size
        shapes = family.layout.tensor_shapes(sizes)
        declared = functions_of(config).param_specs(config).values()
        made = [name for spec in declared for name in spec.tensors]
        assert len(made) == count
        assert sorted(made) == sorted(shapes)
        for spec in declared:
            assert spec.num_values == sum(
                int(np.prod(shapes[name])) for name in spec.tensors
            )
