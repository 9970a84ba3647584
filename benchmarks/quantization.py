"""What quantization does to the bundled pair: its texts' likelihood, bytes and speed.

Of every form of the target: perplexity of documents that training did not see, KL
divergence of its distributions from those of the weights as they are, and how often
both want the same token. Of pairs of forms, on a CPU at batch 1: tokens per second,
plain and with drafts, and acceptance; also with a draft whose head is cut to a quarter
of the vocabulary. Prints a line per row and writes
benchmarks/results/quantization-cpu.json. See benchmarks/README.md.
"""

import argparse
import dataclasses
import itertools
import json
import lzma
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from benchmarks.cpu_pair import DRAFT, TARGET, header, make_engine, warn_unless_quiet
from benchmarks.measure import PromptRuns, run_prompts, summarise
from benchmarks.prompts import bundled
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.model_folders import model_folder
from jaxspec.models.families import config_from_folder
from jaxspec.models.network import build_network
from jaxspec.models.weights import load_params
from jaxspec.sharding import make_mesh
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.train.rows import RowsBackend, no_keys, rows_batch
from jaxspec_checkpoints import open_checkpoint
from jaxspec_checkpoints.quantization import VALUE_TYPES, named_scheme
from jaxspec_kernels.bits import ScaledPages, from_storage, to_storage

# What keys and values are brought to where they are kept in eight bits.
KV_POOLS: dict[str, Any] = {
    "int8": ScaledPages(jnp.zeros(0, jnp.int8), jnp.zeros(0)),
    "fp8": jnp.zeros(0, jnp.float8_e4m3fn),
}
PATH = Path(__file__).parent / "results" / "quantization-cpu.json"
GREEDY = {"temperature": 0.0}
# Kind, whether the embedding is kept in int8 as well, and what keys and values are.
Form = tuple[str | None, bool, str]
FORMS: tuple[Form, ...] = (
    (None, False, "auto"),
    *((*form, "auto") for form in itertools.product(VALUE_TYPES, (False, True))),
    *((None, False, kind) for kind in KV_POOLS),
)
# Of 8,192 tokens, those that a trimmed draft keeps.
TRIMMED = 2048


class Pair(NamedTuple):
    """Forms of target and draft; the option of embeddings is for both."""

    target: str | None
    draft: str | None
    has_int8_embedding: bool = False
    draft_vocab_size: int | None = None


PAIRS = (
    Pair(None, None),
    Pair(None, "int8"),
    Pair(None, "int8", True),
    Pair(None, "int4", True),
    Pair(None, None, False, TRIMMED),
    Pair(None, "int8", False, TRIMMED),
    Pair(None, "int8", True, TRIMMED),
    Pair(None, "int4", True, TRIMMED),
    Pair("int8", "int8"),
    Pair("int8", "int8", True),
    Pair("int8", "int8", True, TRIMMED),
    Pair("int4", "int4", True),
)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--corpus", type=Path, help="folder with valid.jsonl.xz, for what is read")
    add("--documents", type=int, default=40, help="about as many, of all domains")
    add("--length", type=int, default=256, help="tokens of a piece of a document")
    add("--rows", type=int, default=4, help="pieces that are read together")
    add("--num-tokens", type=int, default=128, help="new tokens of every request")
    add("--num-prompts", type=int, default=8, help="about as many, evenly chosen")
    add("--num-speculative-tokens", type=int, default=4)
    add("--repeats", type=int, default=5, help="runs of every prompt in every mode")
    add("--dtype", default="float32")
    add("--skip-speed", action="store_true", help="only what is read")
    add("--skip-quality", action="store_true", help="only what is timed")
    add("--output", type=Path, default=PATH)
    return parser


def main() -> None:
    options = make_parser().parse_args()
    if options.corpus is None and not options.skip_quality:
        raise SystemExit("--corpus is missing: what is read is read from there")
    device = warn_unless_quiet()
    quality = [] if options.skip_quality else list(measure_quality(options))
    result: dict[str, Any] = {"quality": quality, "speed": []}
    engines = [] if options.skip_speed else [engine_of(pair, options) for pair in PAIRS]
    if engines:
        every = list(bundled("prompts.jsonl"))
        prompts = every[:: max(len(every) // options.num_prompts, 1)]
        for row in measure_speed(engines, prompts, options):
            result["speed"].append(row)
            print(json.dumps(row))
    engine = engines[0] if engines else make_engine(options)
    result = header("quantization", engine, options, device) | {"draft": DRAFT} | result
    options.output.write_text(json.dumps(result) + "\n", encoding="utf-8")


def measure_quality(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for every form, the one without quantization first."""
    folder = model_folder(TARGET, "model")
    pieces = read_pieces(options, Tokenizer.from_folder(str(folder)))
    plain = Reader(folder, None, has_embedding=False, kv_kind="auto", options=options)
    for kind, has_embedding, kv_kind in FORMS:
        reader = Reader(
            folder,
            kind,
            has_embedding=has_embedding,
            kv_kind=kv_kind,
            options=options,
        )
        told = f"weights {kind or 'as they are'}, keys and values {kv_kind}"
        sums = np.zeros(3)
        for start in tqdm(range(0, len(pieces), options.rows), desc=told):
            sums += plain.compare(reader, pieces[start : start + options.rows])
        count = pieces.shape[0] * (pieces.shape[1] - 1)
        row = {
            "kind": kind,
            "has_int8_embedding": has_embedding,
            "kv_cache_dtype": kv_kind,
            "weight_bytes": reader.num_bytes,
            "num_tokens": count,
            "perplexity": math.exp(sums[0] / count),
            "kl_nats_per_token": sums[1] / count,
            "share_of_same_first": sums[2] / count,
        }
        print(json.dumps(row))
        yield row


def read_pieces(options: argparse.Namespace, tokenizer: Tokenizer) -> np.ndarray:
    """Whole pieces of documents that are evenly chosen: [piece, token]."""
    with lzma.open(options.corpus / "valid.jsonl.xz", "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    pieces = []
    for text in texts[:: max(len(texts) // options.documents, 1)]:
        tokens = tokenizer.encode(text)
        for start in range(0, len(tokens) - options.length + 1, options.length):
            pieces.append(tokens[start : start + options.length])
    whole = len(pieces) // options.rows * options.rows
    if not whole:
        raise SystemExit(
            f"too few documents of {options.length} tokens: lower --length"
        )
    return np.array(pieces[:whole], np.int32)


@dataclass(frozen=True, kw_only=True)
class RoundedRows(RowsBackend):
    """Keys and values as pages would hold them: each depends on its token alone."""

    kv_kind: str

    def write(
        self, kv_pages: Any, key: Any, value: Any, slot_mapping: Any, num_q_heads: int
    ) -> Any:
        pool = KV_POOLS.get(self.kv_kind)
        if pool is not None:
            key, value = (from_storage(to_storage(one, pool)) for one in (key, value))
        return super().write(kv_pages, key, value, slot_mapping, num_q_heads)


class Reader:
    """The target in one form, which reads rows of text."""

    def __init__(
        self,
        folder: Path,
        kind: str | None,
        *,
        has_embedding: bool,
        kv_kind: str,
        options: argparse.Namespace,
    ):
        config = config_from_folder(folder)
        if kind is not None:
            scheme = named_scheme(kind, has_embedding=has_embedding)
            config = dataclasses.replace(config, quantization=scheme)
        tensors, dtype = open_checkpoint(folder).tensors, jnp.dtype(options.dtype)
        self._params = load_params(config, tensors, dtype=dtype, mesh=make_mesh(1))

        backend = RoundedRows(kv_kind=kv_kind)

        def log_probs(params: Any, tokens: jax.Array) -> jax.Array:
            network = build_network(config, params, backend)
            empty = no_keys(tokens, config.num_kv_heads, config.head_dim, dtype)
            hidden, _ = network.hidden(rows_batch(tokens), (empty,) * config.num_layers)
            return jax.nn.log_softmax(network.logits(hidden.rows), axis=-1)

        self._run = jax.jit(log_probs)

    @property
    def num_bytes(self) -> int:
        """Of all parameters, as they are held."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._params))

    def compare(self, other: "Reader", tokens: np.ndarray) -> np.ndarray:
        """Sums over tokens: the other's loss, KL(self || other), and same firsts."""
        ours, theirs = (
            np.asarray(one._run(one._params, jnp.asarray(tokens)))
            .reshape(*tokens.shape, -1)[:, :-1]
            .astype(np.float64)
            for one in (self, other)
        )
        loss = -np.take_along_axis(theirs, tokens[:, 1:, None], axis=2).sum()
        divergence = (np.exp(ours) * (ours - theirs)).sum()
        same = (ours.argmax(axis=2) == theirs.argmax(axis=2)).sum()
        return np.array([loss, divergence, same])


def measure_speed(
    engines: list[LLMEngine],
    prompts: list[tuple[str, str]],
    options: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """A row for every pair of forms; all engines take turns at every prompt."""
    runs: list[list[PromptRuns]] = [[] for _ in PAIRS]
    for prompt in tqdm(prompts, desc="prompts"):
        for engine, own in zip(engines, runs, strict=True):
            own += run_prompts(engine, [prompt], options, GREEDY)
    first = summarise(runs[0])
    for pair, engine, own in zip(PAIRS, engines, runs, strict=True):
        found = summarise(own)
        plan = engine.runner.memory
        assert plan is not None, "an engine was made without a memory plan"
        facts = plan.facts
        yield {
            **pair._asdict(),
            "target_bytes": facts.target.weight_bytes,
            "draft_bytes": facts.draft.weight_bytes,
            **found,
            "plain_ratio": found["plain_tokens_per_s"] / first["plain_tokens_per_s"],
            "speculative_ratio": found["speculative_tokens_per_s"]
            / first["speculative_tokens_per_s"],
        }


def engine_of(pair: Pair, options: argparse.Namespace) -> LLMEngine:
    return make_engine(
        options,
        quantization=pair.target,
        quantize_embedding=pair.has_int8_embedding,
        speculative_config={
            "model": DRAFT,
            "quantization": pair.draft,
            "draft_vocab_size": pair.draft_vocab_size,
            "num_speculative_tokens": options.num_speculative_tokens,
            "controller": "fixed",
        },
    )


if __name__ == "__main__":
    main()
