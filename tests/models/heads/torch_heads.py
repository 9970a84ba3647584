"""Heads in torch, written from the papers and from other projects' checkpoints.

They share no code with ours: tensors have the names of the files, and whole texts are
computed instead of pages.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, VOCAB, DRAFT_VOCAB, LAYERS = 24, 50, 20, 6
INNER, Q_HEADS, KV_HEADS, HEAD_DIM = 40, 4, 2, 8
THETA, EPSILON = 10000.0, 1e-5


def random_tensors(shapes: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Return matrices whose outputs have size one, and vectors around one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        is_matrix = len(shape) == 2
        tensors[name] = values / shape[1] ** 0.5 if is_matrix else 1 + 0.3 * values
    return tensors


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


# EAGLE and EAGLE-3


def layer_shapes(layer: str, width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer whose attention has inputs of this width."""
    queries, keys = Q_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        layer + "self_attn.q_proj.weight": (queries, width),
        layer + "self_attn.k_proj.weight": (keys, width),
        layer + "self_attn.v_proj.weight": (keys, width),
        layer + "self_attn.o_proj.weight": (HIDDEN, queries),
        layer + "mlp.gate_proj.weight": (INNER, HIDDEN),
        layer + "mlp.up_proj.weight": (INNER, HIDDEN),
        layer + "mlp.down_proj.weight": (HIDDEN, INNER),
        layer + "post_attention_layernorm.weight": (HIDDEN,),
    }


def eagle3_tensors(
    layer: str = "layers.0.", *, has_qk_norm: bool = False, pad_rows: int = 0
) -> dict[str, torch.Tensor]:
    """Return tensors of an EAGLE-3 head with names that begin with `layer`.

    In files of SafeAILab and SpecForge, `layer` is `midlayer.`.

    Args:
        pad_rows: Rows after the target's vocabulary, which the files count.
    """
    shapes = {"fc.weight": (HIDDEN, 3 * HIDDEN), **layer_shapes(layer, 2 * HIDDEN)}
    for name in (layer + "hidden_norm", layer + "input_layernorm", "norm"):
        shapes[f"{name}.weight"] = (HIDDEN,)
    if has_qk_norm:
        for name in ("q_norm", "k_norm"):
            shapes[f"{layer}self_attn.{name}.weight"] = (HEAD_DIM,)
    tensors = random_tensors(shapes | {"lm_head.weight": (DRAFT_VOCAB, HIDDEN)})
    generator = torch.Generator().manual_seed(1)
    kept = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    tensors["d2t"] = kept - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.isin(torch.arange(VOCAB + pad_rows), kept)
    return tensors


def layer_config() -> dict[str, Any]:
    return dict(
        model_type="llama",
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_attention_heads=Q_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_hidden_layers=1,
        hidden_act="silu",
        vocab_size=VOCAB,
        rms_norm_eps=EPSILON,
        rope_theta=THETA,
    )


def speculators_config(**changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = dict(
        architectures=["Eagle3Speculator"],
        speculators_model_type="eagle3",
        transformer_layer_config=layer_config(),
        draft_vocab_size=DRAFT_VOCAB,
        norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=[2, 3, 5],
        speculators_config=dict(algorithm="eagle3"),
    )
    return content | changes


def specforge_config(**changes: Any) -> dict[str, Any]:
    """Return a config as SpecForge, SafeAILab and SGLang write it.

    They count layers from 0.
    """
    content = layer_config() | dict(
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=DRAFT_VOCAB,
        eagle_config=dict(
            eagle_aux_hidden_state_layer_ids=[1, 2, 4], use_aux_hidden_state=True
        ),
    )
    return content | changes


def gemma3_config(**changes: Any) -> dict[str, Any]:
    """Return a config with the keys of SpecForge's files for Gemma 3.

    These count the image token (1B) or all rows (27B) after Gemma's vocabulary.
    """
    content = specforge_config(
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.02,
        max_position_embeddings=32768,
        rope_scaling=None,
        sliding_window=512,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        transformers_version="4.50.0",
        use_cache=True,
        use_sliding_window=False,
        target_model_type="gemma3_text",
        eagle_config=dict(eagle_aux_hidden_state_layer_ids=[0, 2, 4]),
    )
    return content | changes


def rms_norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows / (rows.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * weight


def rotated(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate [token, head, head_dim] by position, as complex numbers of both halves."""
    half = HEAD_DIM // 2
    frequency = THETA ** -(torch.arange(half) / half)
    angle = positions[:, None].float() * frequency
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    turned = torch.complex(rows[..., :half], rows[..., half:]) * turn
    return torch.cat([turned.real, turned.imag], -1)


def eagle_tensors(form: str = "papers", *, has_bias: bool = False) -> dict[str, Any]:
    """Return tensors of an EAGLE head in the format `papers` or `speculators`.

    The latter includes a copy of the target's output matrix.
    """
    fc, layer = "fc.", "layers.0."
    if form == "speculators":
        fc, layer = "fusion_fc.", "transformer."
    shapes: dict[str, Any] = {fc + "weight": (HIDDEN, 2 * HIDDEN)}
    shapes |= layer_shapes(layer, HIDDEN)
    if has_bias:
        shapes[fc + "bias"] = (HIDDEN,)
    if form == "speculators":
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return random_tensors(shapes)


def eagle_config(form: str = "papers", **changes: Any) -> dict[str, Any]:
    if form == "papers":
        return layer_config() | dict(architectures=["LlamaForCausalLM"]) | changes
    content: dict[str, Any] = dict(
        architectures=["EagleSpeculator"],
        speculators_model_type="eagle",
        transformer_layer_architecture="LlamaDecoderLayer",
        transformer_layer_config=layer_config(),
        layernorms=False,
        fusion_bias=False,
    )
    return content | changes


def eagle_rows(
    tensors: dict[str, torch.Tensor], embedded: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """Return the layer's outputs for rows at positions 0, 1, ... of a sequence."""
    names = {"fusion_fc.": "fc.", "transformer.": "layers.0."}
    own = {}
    for name, value in tensors.items():
        for theirs, ours in names.items():
            name = ours + name.removeprefix(theirs) if theirs in name else name
        own[name.removeprefix("layers.0.")] = value
    stream = torch.cat([embedded, hidden], -1) @ own["fc.weight"].T
    stream = stream + own.get("fc.bias", torch.zeros(HIDDEN))
    return after_attention(own, stream, attention(own, stream))


def eagle3_rows(
    tensors: dict[str, torch.Tensor],
    embedded: torch.Tensor,
    hidden: torch.Tensor,
    *,
    norm_before_residual: bool,
    layer: str = "layers.0.",
) -> torch.Tensor:
    """Return the layer's outputs for rows at positions 0, 1, ... of a sequence."""
    own = {
        name.removeprefix(layer): value
        for name, value in tensors.items()
        if name.startswith(layer)
    }
    normed = rms_norm(hidden, own["hidden_norm.weight"])
    both = torch.cat([rms_norm(embedded, own["input_layernorm.weight"]), normed], -1)
    residual = normed if norm_before_residual else hidden
    return after_attention(own, residual, attention(own, both))


def projected(
    own: dict[str, torch.Tensor], name: str, rows: torch.Tensor
) -> torch.Tensor:
    """Return a layer's queries, keys or values: [token, head, head_dim]."""
    found = rows @ own[f"self_attn.{name}_proj.weight"].T
    return found.view(len(rows), -1, HEAD_DIM)


def attention(own: dict[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Return the causal attention of a Llama layer."""
    positions = torch.arange(len(rows))
    query, key, value = (projected(own, name, rows) for name in "qkv")
    if "self_attn.q_norm.weight" in own:
        query = rms_norm(query, own["self_attn.q_norm.weight"])
        key = rms_norm(key, own["self_attn.k_norm.weight"])
    query, key = rotated(query, positions), rotated(key, positions)
    group = Q_HEADS // KV_HEADS
    key, value = (part.repeat_interleave(group, 1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / HEAD_DIM**0.5
    scores = scores.masked_fill(positions > positions[:, None], -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)


def after_attention(
    own: dict[str, torch.Tensor], residual: torch.Tensor, mixed: torch.Tensor
) -> torch.Tensor:
    """Return the output of the layer after its attention."""
    stream = residual + mixed @ own["self_attn.o_proj.weight"].T
    inner = rms_norm(stream, own["post_attention_layernorm.weight"])
    gate = torch.nn.functional.silu(inner @ own["mlp.gate_proj.weight"].T)
    inner = gate * (inner @ own["mlp.up_proj.weight"].T)
    return stream + inner @ own["mlp.down_proj.weight"].T


def eagle3_logits(
    tensors: dict[str, torch.Tensor], hidden: torch.Tensor
) -> torch.Tensor:
    """Return logits of all tokens; -inf for those that the head cannot propose."""
    own = rms_norm(hidden, tensors["norm.weight"]) @ tensors["lm_head.weight"].T
    whole = torch.full((len(own), VOCAB), -math.inf)
    whole[:, torch.arange(DRAFT_VOCAB) + tensors["d2t"]] = own
    return whole


# DFlash

# The window of the last layer, which sees only earlier rows of the block.
BLOCK, MASK, WINDOW = 5, 7, 6


def dflash_tensors(*, has_lm_head: bool = False) -> dict[str, torch.Tensor]:
    """Return tensors of a drafter of two layers over three of the target's."""
    shapes: dict[str, Any] = {"fc.weight": (HIDDEN, 3 * HIDDEN)}
    for number in range(2):
        layer = f"layers.{number}."
        shapes |= layer_shapes(layer, HIDDEN)
        shapes[layer + "input_layernorm.weight"] = (HIDDEN,)
        for name in ("q_norm", "k_norm"):
            shapes[f"{layer}self_attn.{name}.weight"] = (HEAD_DIM,)
    shapes |= {"hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    if not has_lm_head:
        return random_tensors(shapes)
    head = eagle3_tensors()
    kept = {name: head[name] for name in ("d2t", "t2d", "lm_head.weight")}
    return random_tensors(shapes) | kept


def zlab_config(**changes: Any) -> dict[str, Any]:
    """Return a config with the keys of z-lab's and SpecForge's files.

    They count layers from 0.
    """
    content = layer_config() | dict(
        architectures=["DFlashDraftModel"],
        auto_map={"AutoModel": "dflash.DFlashDraftModel"},
        attention_bias=False,
        block_size=BLOCK,
        dflash_config=dict(mask_token_id=MASK, target_layer_ids=[1, 2, 4]),
        dtype="bfloat16",
        layer_types=["full_attention", "sliding_attention"],
        max_position_embeddings=40960,
        max_window_layers=2,
        model_type="qwen3",
        num_hidden_layers=2,
        num_target_layers=LAYERS,
        rope_scaling=None,
        sliding_window=WINDOW,
        tie_word_embeddings=False,
        use_sliding_window=True,
    )
    return content | changes


def dflash_speculators_config(**changes: Any) -> dict[str, Any]:
    layer = layer_config() | dict(
        model_type="qwen3",
        num_hidden_layers=2,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=WINDOW,
    )
    content: dict[str, Any] = dict(
        architectures=["DFlashDraftModel"],
        speculators_model_type="dflash",
        speculators_version="0.9.0",
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCAB,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[2, 3, 5],
        mask_token_id=MASK,
        sliding_window_non_causal=False,
        target_hidden_size=None,
        projector_type="dflash",
        shift_label=False,
        speculators_config=dict(
            algorithm="dflash",
            proposal_methods=[dict(speculative_tokens=BLOCK - 1)],
        ),
    )
    return content | changes


def dflash_rows(
    tensors: dict[str, torch.Tensor],
    context: torch.Tensor,
    embedded: torch.Tensor,
    windows: tuple[int | None, ...] = (None, WINDOW),
) -> torch.Tensor:
    """Return the normalized outputs of a block, after a whole text.

    Args:
        context: The target's hidden states of several layers, joined: [token, model].
        embedded: The block's tokens.
    """
    fused = rms_norm(context @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    stream, start = embedded, len(context)
    positions = torch.arange(start + len(embedded))
    own_positions = positions[start:]
    distance = own_positions[:, None] - positions
    for number, window in enumerate(windows):
        layer = f"layers.{number}."
        own = {
            name.removeprefix(layer): value
            for name, value in tensors.items()
            if name.startswith(layer)
        }
        normed = rms_norm(stream, own["input_layernorm.weight"])
        both = torch.cat([fused, normed])
        query = projected(own, "q", normed)
        key, value = projected(own, "k", both), projected(own, "v", both)
        query = rms_norm(query, own["self_attn.q_norm.weight"])
        key = rms_norm(key, own["self_attn.k_norm.weight"])
        query, key = rotated(query, own_positions), rotated(key, positions)
        key, value = (
            part.repeat_interleave(query.shape[1] // part.shape[1], 1)
            for part in (key, value)
        )
        scores = torch.einsum("qhd,khd->hqk", query, key) / HEAD_DIM**0.5
        if window is not None:
            is_seen = (distance >= 0) & (distance < window)
            scores = scores.masked_fill(~is_seen, -math.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
        stream = after_attention(own, stream, mixed)
    return rms_norm(stream, tensors["norm.weight"])


# Medusa


def medusa_tensors(heads: int, blocks: int, *, is_papers: bool) -> dict[str, Any]:
    """Return tensors of Medusa heads with vLLM's names.

    If `is_papers`, they have the names of the paper's code, and biases.
    """
    shapes = {}
    for head in range(heads):
        for block in range(blocks):
            vllms = f"blocks.{head}.layers.{block}"
            name = f"{head}.{block}.linear" if is_papers else vllms
            shapes[f"{name}.weight"] = (HIDDEN, HIDDEN)
            if is_papers:
                shapes[f"{name}.bias"] = (HIDDEN,)
        name = f"{head}.{blocks}" if is_papers else f"lm_heads.{head}"
        shapes[f"{name}.weight"] = (VOCAB, HIDDEN)
    return random_tensors(shapes)


def medusa_logits(
    rows: torch.Tensor, blocks: list[tuple[Any, Any]], lm_head: torch.Tensor
) -> torch.Tensor:
    """Return one head's logits; a block is a matrix and a bias, which may be 0."""
    for weight, bias in blocks:
        rows = rows + torch.nn.functional.silu(rows @ weight.T + bias)
    return rows @ lm_head.T
