"""Record what HuggingFace's programs say of the bundled pair: `golden/bundled.json`.

Run from the root of the checkout, when the pair changes:

    .venv/bin/python tests/accuracy/record_bundled.py

Nothing here is jaxspec's but the folders of the pair.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoTokenizer, Gemma2ForCausalLM

ROOT = Path(__file__).parents[2]
PAIR = ROOT / "checkpoints" / "jaxspec_checkpoints" / "tiny"
DESTINATION = Path(__file__).parent / "golden" / "bundled.json"

PROMPTS = ("I love to", "Once upon a time, there was")
TEXT = "The capital of Hungary is Budapest which is located in Europe."
# Longer than the window of 128.
PREFIX, NUM_PREFIXES = "The sun was warm and the sky was blue. ", 20
NEW_TOKENS = 24
QUESTION = "Tell me a short story about a dragon."
TEXTS = (
    "This is a test",
    "",
    " ",
    "  ",
    "Hi  Hello",
    " Hello",
    "A dragon, 1066 and 3.5!",
    "生活的真谛是",
    "naïve\n\n\tcafé 🐉",
)


def record(name: str) -> list[dict[str, Any]]:
    model = Gemma2ForCausalLM.from_pretrained(
        PAIR / name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(PAIR / name)
    source = f"transformers {transformers.__version__}, eager attention, float32, CPU"

    def logits(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].double().numpy()

    def generate(ids: list[int], *, ignore_eos: bool) -> list[int]:
        known = list(ids)
        while len(known) < len(ids) + NEW_TOKENS:
            known.append(int(logits(known)[-1].argmax()))
            if not ignore_eos and known[-1] in (1, 107):
                break
        return known[len(ids) :]

    def greedy(prompt: str, **prefix: Any) -> dict[str, Any]:
        text = prefix.get("prefix", "") * prefix.get("num_prefixes", 0) + prompt
        new = generate(tokenizer.encode(text), ignore_eos=True)
        # Two cases in one: the text itself, and that every token is the best one.
        return prefix | {
            "kind": "greedy",
            "prompt": prompt,
            "text": tokenizer.decode(new, skip_special_tokens=True),
            "num_tokens": NEW_TOKENS,
            "exact_in": ["float32"],
            "margin": 1e-3,
        }

    def prompt_values(prompt: str) -> dict[str, Any]:
        ids = tokenizer.encode(prompt)
        scale = torch.tensor(model.config.hidden_size**0.5).bfloat16()
        rows = model.model.embed_tokens.weight[ids].detach().bfloat16() * scale
        return {
            "prompt": prompt,
            "tokens": ids,
            "first": rows[:, :3].tolist(),
            "last": rows[:, -3:].tolist(),
            "logits": logits(ids)[:, :3].tolist(),
        }

    def bits_per_byte() -> float:
        ids = tokenizer.encode(TEXT)
        rows = torch.tensor(logits(ids[:-1])).log_softmax(-1)
        nats = -rows[torch.arange(len(ids) - 1), ids[1:]].sum()
        bits = float(nats) / np.log(2) + np.log2(model.config.vocab_size)
        return bits / len(TEXT.encode())

    def answer() -> str:
        turn = f"<start_of_turn>user\n{QUESTION}<end_of_turn>\n<start_of_turn>model\n"
        new = generate(tokenizer.encode(turn), ignore_eos=False)
        return tokenizer.decode(new, skip_special_tokens=True)

    values = [prompt_values(prompt) for prompt in PROMPTS]
    cases = [
        {
            "kind": "embeddings",
            "rtol": 0.0078125,
            "prompts": [_without(each, "logits") for each in values],
        },
        {
            "kind": "logits",
            "ids": [0, 1, 2],
            "atol": {"float32": 1e-3, "bfloat16": 0.5},
            "prompts": [_without(each, "first", "last") for each in values],
        },
        {
            "kind": "cross_entropy",
            "text": TEXT,
            "bits_per_byte": bits_per_byte(),
            "tolerance": 1e-4,
        },
        {
            "kind": "encode",
            "ids_of": {text: tokenizer.encode(text) for text in TEXTS},
        },
        {
            "kind": "decode",
            "texts": [
                {"ids": ids, "text": tokenizer.decode(ids)}
                for ids in ([869], [4000, 869], [2000, 3000, 5000])
            ],
        },
    ]
    if name == "target":
        # One of the two is enough: an engine takes long to compile.
        cases += [
            greedy(PROMPTS[1]),
            greedy("In the morning", prefix=PREFIX, num_prefixes=NUM_PREFIXES),
            {
                "kind": "answers",
                "num_tokens": NEW_TOKENS,
                "contains": {QUESTION: answer()},
            },
        ]
    return [{"models": [name], "source": source} | case for case in cases]


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def main() -> None:
    cases = [case for name in ("target", "draft") for case in record(name)]
    text = json.dumps({"cases": cases}, indent=1, ensure_ascii=False)
    # Numbers of one row on one line.
    text = re.sub(
        r"\[[\s\d.,e-]+\]", lambda row: "[" + " ".join(row[0][1:-1].split()) + "]", text
    )
    assert json.loads(text) == {"cases": cases}
    DESTINATION.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
