"""Owns `LoRARequest`, which scripts for vLLM import and mostly leave unused."""

from dataclasses import dataclass


@dataclass
class LoRARequest:
    """Names a LoRA adapter; calls that receive one reject it as not supported."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
