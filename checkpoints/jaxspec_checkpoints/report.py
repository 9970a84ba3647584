"""Writes the report of `inspect`: a checkpoint's format, sizes, replicated parts."""

import math

from jaxspec_checkpoints.checkpoint import Checkpoint
from jaxspec_checkpoints.layout import HEAD, Sizes, common_dtype
from jaxspec_checkpoints.packing import scheme_of
from jaxspec_checkpoints.quality import read_quality
from jaxspec_checkpoints.quantization import QuantizedTensor, held_bytes

_FORMATS = {
    "hf": "HuggingFace safetensors",
    "kaggle": "Kaggle/Flax Orbax",
    "orbax": "jaxspec Orbax",
    "gguf": "llama.cpp GGUF",
}
# Common tensor-parallel sizes.
TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)


def describe(checkpoint: Checkpoint) -> str:
    """Return the report as lines of `name  value`."""
    sizes = checkpoint.sizes
    kinds = {
        one.values.dtype if isinstance(one, QuantizedTensor) else one.dtype
        for one in checkpoint.tensors.values()
    }
    dtypes = sorted(kind.name for kind in kinds)
    plain = {
        name: one
        for name, one in checkpoint.tensors.items()
        if not isinstance(one, QuantizedTensor)
    }
    main = common_dtype(plain).name
    layout = checkpoint.layout
    name, title = layout.published_name(sizes), layout.title
    lines = [
        ("format", f"{checkpoint.format} ({_FORMATS[checkpoint.format]})"),
        (
            "model",
            f"{title} {name.upper()}"
            if name
            else f"{title} of a size that is not published",
        ),
        ("layers", f"{sizes.num_layers}, sliding window {_window(checkpoint)}"),
        ("hidden", f"{sizes.hidden_size}, feed-forward {sizes.intermediate_size}"),
        (
            "heads",
            f"{sizes.num_q_heads} query, {sizes.num_kv_heads} KV, of {sizes.head_dim}",
        ),
        ("vocabulary", f"{sizes.vocab_size:,}"),
        ("LM head", HEAD if HEAD in checkpoint.tensors else "the embedding"),
        ("tensors", f"{len(checkpoint.tensors):,}"),
        ("parameters", f"{checkpoint.num_parameters:,}"),
        ("bytes", f"{checkpoint.num_bytes:,} ({size(checkpoint.num_bytes)})"),
        ("dtype", ", ".join([main, *(name for name in dtypes if name != main)])),
        ("files", _files(checkpoint)),
    ]
    scheme = scheme_of(checkpoint.config)
    if scheme is not None:
        lines.append(("quantization", scheme.describe()))
        lines.append(("quality", _quality(checkpoint)))
    for devices in TENSOR_PARALLEL_SIZES[1:]:
        lines.append((f"on {devices} devices", _placement(checkpoint, devices)))
    width = max(len(title) for title, _ in lines)
    return "\n".join(f"{title:{width}}  {value}" for title, value in lines)


def replicated(sizes: Sizes, num_devices: int) -> dict[str, str]:
    """Return the parts that each of `num_devices` devices holds whole, by name.

    A tensor is split along heads, feed-forward rows or vocabulary. If that axis cannot
    be split evenly over the devices, each device gets the whole tensor. Norms are never
    split.
    """
    whole: dict[str, str] = dict.fromkeys(
        (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
            "norm",
        ),
        "norms",
    )
    # Gate and up rows are stored in alternating blocks, which are not split.
    num_blocks = sizes.intermediate_size // math.gcd(sizes.intermediate_size, 128)
    groups = [
        (
            ("embed_tokens", "lm_head"),
            sizes.vocab_size,
            f"vocabulary of {sizes.vocab_size:,}",
        ),
        (("q_proj", "o_proj"), sizes.num_q_heads, f"{sizes.num_q_heads} query heads"),
        (("k_proj", "v_proj"), sizes.num_kv_heads, f"{sizes.num_kv_heads} KV heads"),
        (("gate_proj", "up_proj"), num_blocks, "gate and up rows"),
        (("down_proj",), sizes.intermediate_size, "down columns"),
    ]
    for names, count, reason in groups:
        is_repeated = names[0] == "k_proj" and _holds_one_head(sizes, num_devices)
        if count % num_devices and not is_repeated:
            whole |= dict.fromkeys(names, reason)
    return whole


def _holds_one_head(sizes: Sizes, num_devices: int) -> bool:
    """Return whether a device holds a copy of the one KV head it reads and no other."""
    is_even = num_devices % sizes.num_kv_heads == 0
    is_even &= sizes.num_q_heads % num_devices == 0
    return is_even and num_devices > sizes.num_kv_heads


def size(num_bytes: float) -> str:
    """Return bytes in readable form: `5.23 GB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.3g} {unit}" if num_bytes < 1000 else f"{num_bytes:.0f} {unit}"


def _files(checkpoint: Checkpoint) -> str:
    """Return the files that describe the model, and those that can be generated."""
    made = [f"{name} (from metadata)" for name in sorted(checkpoint.made_files)]
    return ", ".join([*checkpoint.side_files, *made]) or "no config, no tokenizer"


def _quality(checkpoint: Checkpoint) -> str:
    found = read_quality(checkpoint.folder)
    if found is not None:
        return found.line()
    return (
        f"not measured: python -m jaxspec quality --model {checkpoint.folder} "
        "--reference MODEL --text FILE"
    )


def _window(checkpoint: Checkpoint) -> int:
    return checkpoint.config.get("sliding_window") or 4096


def _placement(checkpoint: Checkpoint, num_devices: int) -> str:
    whole = replicated(checkpoint.sizes, num_devices)
    copied, per_device = dict[str, int](), 0
    for name, tensor in checkpoint.tensors.items():
        reason = whole.get(name.split(".")[-2])
        if reason is None and name.split(".")[-2] in ("k_proj", "v_proj"):
            heads = min(num_devices, checkpoint.sizes.num_kv_heads)
            per_device += held_bytes(tensor) // heads
        elif reason is None:
            per_device += held_bytes(tensor) // num_devices
        else:
            per_device += held_bytes(tensor)
            copied[reason] = copied.get(reason, 0) + held_bytes(tensor)
    parts = ", ".join(f"{reason} ({size(count)})" for reason, count in copied.items())
    return f"{size(per_device)} each; replicated: {parts}"
