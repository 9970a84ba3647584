"""Medusa heads equal torch's, from files in vLLM's and the paper's formats."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxspec.errors import ConfigError
from jaxspec.models.heads import medusa
from jaxspec.models.heads.config import MedusaConfig
from jaxspec.models.matrices import DenseMatrix
from jaxspec.models.trimmed import LOWEST, to_target_vocab
from tests.models.heads import torch_heads as theirs
from tests.models.heads.targets import EMBEDDING, load

HEADS, BLOCKS = 3, 2
RANDOM = torch.Generator().manual_seed(3)
ROWS = torch.randn(5, theirs.HIDDEN, generator=RANDOM)


def our_logits(folder) -> tuple[MedusaConfig, list[np.ndarray]]:
    config, params = load(folder)
    assert isinstance(config, MedusaConfig)
    rows = medusa.forward(config, params, jnp.asarray(ROWS.numpy()))
    target, found = DenseMatrix(jnp.asarray(EMBEDDING.numpy())), []
    for head, one in enumerate(rows):
        logits = medusa.logits(config, params, head, one, target)
        found.append(np.asarray(to_target_vocab(params, logits, theirs.VOCAB)))
    return config, found


def vllm_config(**changes):
    content = dict(
        model_type="medusa",
        hidden_size=theirs.HIDDEN,
        vocab_size=theirs.VOCAB,
        num_heads=HEADS,
        num_hidden_layers=BLOCKS,
    )
    return content | changes


def blocks_of(tensors, head):
    """Return the blocks of a head with vLLM's names, which has no biases."""
    return [(tensors[f"blocks.{head}.layers.{n}.weight"], 0) for n in range(BLOCKS)]


@pytest.mark.parametrize("prefix", ["", "medusa_heads.", "papers"])
def test_reads_names_of_vllm_and_of_the_paper(tmp_path, prefix):
    is_papers = prefix == "papers"
    tensors = theirs.medusa_tensors(HEADS, BLOCKS, is_papers=is_papers)
    if is_papers:
        content = dict(medusa_num_heads=HEADS, medusa_num_layers=BLOCKS)
        content |= dict(hidden_size=theirs.HIDDEN, vocab_size=theirs.VOCAB)
        theirs.write(tmp_path, content, tensors)
        # The name of the file in the code of Medusa's paper.
        (tmp_path / "model.safetensors").rename(tmp_path / "medusa_lm_head.safetensors")
    else:
        named = {prefix + name: value for name, value in tensors.items()}
        theirs.write(tmp_path, vllm_config(), named)
    config, found = our_logits(tmp_path)
    assert (config.lm_heads, config.has_bias) == (HEADS, is_papers)
    for head in range(HEADS):
        name = f"lm_heads.{head}.weight"
        if not is_papers:
            blocks = blocks_of(tensors, head)
        else:
            names = [f"{head}.{n}.linear" for n in range(BLOCKS)]
            blocks = [
                (tensors[f"{one}.weight"], tensors[f"{one}.bias"]) for one in names
            ]
            name = f"{head}.{BLOCKS}.weight"
        wanted = theirs.medusa_logits(ROWS, blocks, tensors[name])
        np.testing.assert_allclose(found[head], wanted, atol=1e-4)


def test_shared_output_matrices_are_compared(tmp_path):
    tensors = theirs.medusa_tensors(HEADS, BLOCKS, is_papers=False)
    for head in range(1, HEADS):
        tensors[f"lm_heads.{head}.weight"] = tensors["lm_heads.0.weight"].clone()
    content = vllm_config(original_lm_head=True)
    config, found = our_logits(theirs.write(tmp_path / "same", content, tensors))
    assert config.lm_heads == 1 and len(found) == HEADS
    tensors[f"lm_heads.{HEADS - 1}.weight"][-1, -1] += 1
    with pytest.raises(ConfigError, match="lm_heads.2.weight and .* differ"):
        our_logits(theirs.write(tmp_path / "other", content, tensors))


@pytest.mark.parametrize("shared", ["file", "target", "trimmed"])
def test_heads_can_share_one_output_matrix(tmp_path, shared):
    tensors = theirs.medusa_tensors(HEADS, BLOCKS, is_papers=False)
    content = vllm_config(original_lm_head=True)
    lm_head, ids = tensors["lm_heads.0.weight"], torch.arange(theirs.VOCAB)
    for head in range(HEADS):
        del tensors[f"lm_heads.{head}.weight"]
    if shared == "file":  # under the first head's name, as vLLM allows
        tensors["lm_heads.0.weight"] = lm_head
    if shared == "target":
        lm_head = EMBEDDING
    if shared == "trimmed":
        ids = torch.tensor([4, 9, 3, 40, 31])
        lm_head = tensors["lm_head.weight"] = lm_head[ids].contiguous()
        tensors["token_map"], content["truncated_vocab_size"] = ids, len(ids)
    config, found = our_logits(theirs.write(tmp_path, content, tensors))
    assert config.lm_heads == (0 if shared == "target" else 1)
    for head in range(HEADS):
        wanted = theirs.medusa_logits(ROWS, blocks_of(tensors, head), lm_head)
        np.testing.assert_allclose(found[head][:, ids.numpy()], wanted, atol=1e-4)
        assert (found[head] > LOWEST).sum() == wanted.numel()
