"""HuggingFace transformers on the same shapes: plain decoding with random weights.

A static cache and, where it works, `torch.compile`, as its documentation advises.
"""

import time
from statistics import median
from typing import Any

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from benchmarks.step_times import Setting

SHORT = 4  # tokens, of the text that is taken off


def make_model(config: dict[str, Any], setting: Setting) -> Any:
    """Random weights, made on the device in the type that they stay in."""
    sizes = {name: value for name, value in config.items() if name != "architectures"}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, setting.dtype))
    try:
        with torch.device(device):
            model: Any = Gemma2ForCausalLM(Gemma2Config(**sizes))
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def step_s(
    model: Any, setting: Setting, *, seqs: int, is_compiled: bool
) -> dict[str, float]:
    """Seconds of one plain greedy step: a long text less a short one.

    Args:
        is_compiled: By transformers itself, which does so on a GPU.
    """
    prompt = torch.full((seqs, setting.context), 5, device=model.device)

    def took_s(length: int) -> float:
        _wait(model.device)
        start = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=length,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                cache_implementation="static",
                disable_compile=not is_compiled,
            )
        _wait(model.device)
        assert output.shape[1] == setting.context + length
        return time.perf_counter() - start

    lengths = SHORT, SHORT + setting.steps
    for length in lengths:  # compiles, and warms caches and clocks
        took_s(length)
    seconds = []
    for _ in range(setting.repeats):
        short, long = map(took_s, lengths)
        seconds.append((long - short) / setting.steps)
    return {"median": median(seconds), "least": min(seconds)}


def device_name(model: Any) -> str:
    """Of what it runs on, as jax calls it."""
    if model.device.type == "cuda":
        return torch.cuda.get_device_name(model.device)
    return model.device.type


def _wait(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
