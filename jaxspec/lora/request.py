"""Owns `LoRARequest`, which scripts for vLLM import and mostly leave unused."""

from dataclasses import dataclass


@dataclass
class LoRARequest:
    """Names an adapter; every call that is given one says that there are none here."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
