"""Lets the bundled target continue training documents, for its draft's token map.

    python checkpoints/recipes/write_texts.py --corpus CORPUS --out written.jsonl
    python -m jaxspec_checkpoints trim .../tiny/draft written.jsonl

The second command writes the map. Takes some minutes on two cores.
"""

import argparse
import json
import tempfile
from pathlib import Path

import corpus
import numpy as np

from jaxspec import LLM
from jaxspec.engine.model_folders import BUNDLED_TARGET
from jaxspec.train.text import read_documents, read_prompts, write_text

LENGTH, DOCUMENT_CHARACTERS = 256, 3000
# Mean number of tokens generated per document, used to draw enough documents.
TOKENS_EACH = 100


def choose(path: Path, count: int, seed: int) -> list[str]:
    """Return the beginnings of about `count` documents, drawn by domain weight."""
    texts: dict[str, list[str]] = {}
    for document in read_documents(path):
        texts.setdefault(document["domain"], []).append(document["text"])
    random, chosen = np.random.default_rng(seed), list[str]()
    for domain, weight in corpus.DOMAIN_WEIGHTS.items():
        some = random.permutation(len(texts[domain]))[: int(count * weight)]
        chosen += [texts[domain][number][:DOCUMENT_CHARACTERS] for number in some]
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    llm = LLM(
        BUNDLED_TARGET,
        dtype="float32",
        max_model_len=LENGTH,
        max_num_seqs=32,
        num_scheduler_steps=8,
    )
    tokenizer = llm.llm_engine.tokenizer
    count = options.tokens // TOKENS_EACH
    documents = choose(options.corpus / "train.jsonl.xz", count, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "documents.jsonl"
        write_lines(path, documents)
        prompts = read_prompts(path, tokenizer, length=LENGTH, seed=options.seed)
    written = write_text(
        llm,
        prompts,
        length=LENGTH,
        num_tokens=options.tokens,
        seed=options.seed,
    )
    rows = zip(written.tokens, written.starts, written.sizes, strict=True)
    answers = [
        tokenizer.decode(row[start:stop], skip_special_tokens=False)
        for row, start, stop in rows
    ]
    write_lines(options.out, answers)


def write_lines(path: Path, texts: list[str]) -> None:
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    path.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
