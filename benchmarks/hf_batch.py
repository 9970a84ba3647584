"""All prompts of a throughput run by HuggingFace `generate`, in batches.

Reads the task from stdin (see `throughput.py`), writes one JSON line to stdout.
Prompts are sorted by length, so that a batch holds few pads: its best case.
"""

import hashlib
import json
import os
import sys
import time
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM

from jaxspec.tokenizer import Tokenizer


def main() -> None:
    task = json.load(sys.stdin)
    torch.set_num_threads(task["threads"])
    folder = os.environ["JAXSPEC_TARGET_FOLDER"]
    tokenizer = Tokenizer.from_folder(folder)
    prompts = sorted((tokenizer.encode(text) for text in task["texts"]), key=len)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, task["dtype"]), attn_implementation="eager"
    )
    model.eval()
    model.generation_config.eos_token_id = None
    model.generation_config.do_sample = False
    pad = tokenizer.pad_token_id
    size = task["batch_size"]
    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]

    def run(batch: list[list[int]], num_tokens: int) -> list[list[int]]:
        longest = max(map(len, batch))
        ids = torch.tensor([[pad] * (longest - len(one)) + one for one in batch])
        mask = torch.tensor(
            [[0] * (longest - len(one)) + [1] * len(one) for one in batch]
        )
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=mask, max_new_tokens=num_tokens, pad_token_id=pad
            )
        return output[:, longest:].tolist()

    run(batches[0], 8)
    start = time.monotonic()
    tokens = []
    for batch in tqdm(batches, desc="HuggingFace"):
        tokens += run(batch, task["num_tokens"])
    seconds = time.monotonic() - start
    digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]
    count = sum(map(len, tokens))
    print(json.dumps({"seconds": seconds, "num_tokens": count, "digest": digest}))


if __name__ == "__main__":
    main()
