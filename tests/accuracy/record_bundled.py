"""Record HuggingFace's outputs for the bundled pair: `golden/bundled.json`.

Run from the root of the checkout, when the pair changes:

    .venv/bin/python tests/accuracy/record_bundled.py

Uses nothing of jaxspec except the folders of the pair.
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
TURN = f"<start_of_turn>user\n{QUESTION}<end_of_turn>\n<start_of_turn>model\n"
END_TOKENS = (1, 107)
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
IDS = ([869], [4000, 869], [2000, 3000, 5000])


class Reference:
    """One model of the pair in transformers."""

    def __init__(self, folder: Path):
        self.model: Any = Gemma2ForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def logits(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0].double()

    def continuation(self, text: str, *, ignore_eos: bool) -> str:
        """Generate greedily, without a KV cache."""
        prompt = self.tokenizer.encode(text)
        known = list(prompt)
        while len(known) < len(prompt) + NEW_TOKENS:
            known.append(int(self.logits(known)[-1].argmax()))
            if not ignore_eos and known[-1] in END_TOKENS:
                break
        return self.tokenizer.decode(known[len(prompt) :], skip_special_tokens=True)

    def scaled_rows(self, ids: list[int]) -> torch.Tensor:
        scale = torch.tensor(self.model.config.hidden_size**0.5).bfloat16()
        return self.model.model.embed_tokens.weight[ids].detach().bfloat16() * scale

    def bits_per_byte(self, text: str) -> float:
        ids = self.tokenizer.encode(text)
        rows = self.logits(ids[:-1]).log_softmax(-1)
        nats = -rows[torch.arange(len(ids) - 1), ids[1:]].sum()
        bits = float(nats) / np.log(2) + np.log2(self.model.config.vocab_size)
        return bits / len(text.encode())


def values_of(reference: Reference) -> list[dict[str, Any]]:
    """Record embeddings, logits and token ids, which need one pass or none."""
    encode, decode = reference.tokenizer.encode, reference.tokenizer.decode
    embeddings, logits = [], []
    for prompt in PROMPTS:
        ids = encode(prompt)
        rows = reference.scaled_rows(ids)
        values = reference.logits(ids)[:, :3].tolist()
        each = {"prompt": prompt, "tokens": ids}
        ends = {"first": rows[:, :3].tolist(), "last": rows[:, -3:].tolist()}
        embeddings.append(each | ends)
        logits.append(each | {"logits": values})
    return [
        {"kind": "embeddings", "rtol": 2**-7, "prompts": embeddings},
        {
            "kind": "logits",
            "ids": [0, 1, 2],
            "atol": {"float32": 1e-3, "bfloat16": 0.5},
            "prompts": logits,
        },
        {
            "kind": "cross_entropy",
            "text": TEXT,
            "bits_per_byte": reference.bits_per_byte(TEXT),
            "tolerance": 1e-4,
        },
        {"kind": "encode", "ids_of": {text: encode(text) for text in TEXTS}},
        {
            "kind": "decode",
            "texts": [{"ids": ids, "text": decode(ids)} for ids in IDS],
        },
    ]


def texts_of(reference: Reference) -> list[dict[str, Any]]:
    """Record greedy continuations of prompts."""
    prefix = {"prefix": PREFIX, "num_prefixes": NUM_PREFIXES}
    cases = []
    for beginning, prompt in (({}, PROMPTS[1]), (prefix, "In the morning")):
        whole = PREFIX * beginning.get("num_prefixes", 0) + prompt
        case = {
            "kind": "greedy",
            "prompt": prompt,
            "text": reference.continuation(whole, ignore_eos=True),
            "num_tokens": NEW_TOKENS,
            "exact_in": ["float32"],
            "margin": 1e-3,
        }
        cases.append(beginning | case)
    answer = reference.continuation(TURN, ignore_eos=False)
    contains = {QUESTION: answer}
    return [
        *cases,
        {"kind": "answers", "num_tokens": NEW_TOKENS, "contains": contains},
    ]


def main() -> None:
    source = f"transformers {transformers.__version__}, eager attention, float32, CPU"
    cases = []
    for name in ("target", "draft"):
        reference = Reference(PAIR / name)
        own = values_of(reference)
        if name == "target":
            # Only for one of the two models, because compiling an engine takes long.
            own += texts_of(reference)
        cases += [{"models": [name], "source": source} | case for case in own]
    text = json.dumps({"cases": cases}, indent=1, ensure_ascii=False)
    # Write the numbers of a row on one line.
    text = re.sub(
        r"\[[\s\d.,e-]+\]", lambda row: "[" + " ".join(row[0][1:-1].split()) + "]", text
    )
    assert json.loads(text) == {"cases": cases}
    DESTINATION.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
