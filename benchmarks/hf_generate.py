"""HuggingFace `generate` on the same weights and token ids, in a process of its own.

Reads one JSON object from stdin (folder, dtype, prompts as token ids, num_tokens,
repeats, threads), writes one to stdout. Runs alone: torch's and XLA's threads would
share the cores otherwise.
"""

import json
import sys
import time
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


class Clock(BaseStreamer):
    """Notes when tokens come; the first call brings the prompt."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.monotonic())

    def end(self) -> None:
        pass


def main() -> None:
    task = json.load(sys.stdin)
    torch.set_num_threads(task["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(
        task["folder"],
        dtype=getattr(torch, task["dtype"]),
        attn_implementation="eager",
    )
    model.eval()
    # As for ours: exactly num_tokens tokens, the most likely one each time.
    model.generation_config.eos_token_id = None
    model.generation_config.do_sample = False
    num_tokens = task["num_tokens"]

    def run(prompt: list[int], length: int) -> tuple[float, list[int]]:
        clock = Clock()
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=length,
                streamer=clock,
            )
        tokens = output[0, len(prompt) :].tolist()
        assert len(tokens) == length
        # times[0] is the prompt's, times[1] the first token's.
        return (length - 1) / (clock.times[-1] - clock.times[1]), tokens

    speeds, texts = [], []
    for prompt in tqdm(task["prompts"], desc=f"HuggingFace {task['dtype']}"):
        run(prompt, 4)
        runs = [run(prompt, num_tokens) for _ in range(task["repeats"])]
        speeds.append([speed for speed, _ in runs])
        texts.append(runs[0][1])
    json.dump({"tokens_per_s": speeds, "token_ids": texts}, sys.stdout)


if __name__ == "__main__":
    main()
