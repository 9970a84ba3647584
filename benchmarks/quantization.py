"""Quality, bytes and speed of the bundled pair under quantization.

- Quality of every weight type of the target: perplexity of documents that training did
  not see, KL divergence from the original, and the share of equal top tokens.
- Acceptance with every KV cache type, greedy and sampled with seeds, and the number of
  texts that are equal with and without drafts.
- Speed of pairs of types on a CPU at batch 1: tokens per second, plain and with drafts,
  and acceptance; also with a draft whose LM head is trimmed to a quarter.

Prints a line per row and writes benchmarks/results/quantization-cpu.json; skipped parts
keep their earlier results. See docs/quantization.md.

`--trimmed` measures only the acceptance of drafts with a trimmed LM head, with the
bundled prompts and with documents, greedy and at temperature 1; see docs/drafts.md.

`--tables` runs nothing: it prints the recorded tables, and the bounds for published
sizes that follow from bytes.
"""

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from benchmarks.control import kept_parts
from benchmarks.cpu_pair import DRAFT, TARGET, header, make_engine, warn_unless_quiet
from benchmarks.measure import (
    PromptRuns,
    bundled,
    load_prompts,
    run_prompts,
    sampling,
    summarise,
)
from jaxspec.bench.acceptance import Acceptance, best_num_draft_tokens
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.model_folders import model_folder
from jaxspec.sampling_params import SamplingParams
from jaxspec.sharding import make_mesh
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.train.quality import KV_POOLS, Reader, chosen, compare, cut
from jaxspec_checkpoints import Sizes, tensor_shapes
from jaxspec_checkpoints.counting import read_texts
from jaxspec_checkpoints.gemma.published import published_config
from jaxspec_checkpoints.layout import EMBEDDING
from jaxspec_checkpoints.quantization import VALUE_TYPES, named_scheme

PATH = Path(__file__).parent / "results" / "quantization-cpu.json"
GREEDY = {"temperature": 0.0}
MODES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 0},
}
KV_KINDS = ("auto", *KV_POOLS)
# Weight type, whether the embedding is int8, and KV cache type.
Form = tuple[str | None, bool, str]
FORMS: tuple[Form, ...] = (
    (None, False, "auto"),
    *((*form, "auto") for form in itertools.product(VALUE_TYPES, (False, True))),
    *((None, False, kind) for kind in KV_POOLS),
)
# Number of tokens, of 8,192, that a draft with a trimmed LM head keeps.
TRIMMED = 2048
# Numbers of tokens in the compared LM heads. Drafts are sampled with the requests'
# seeds, so that texts do not depend on the head.
HEADS = (None, 4096, TRIMMED)
HEAD_MODES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "temperature 1": {"temperature": 1.0, "seed": 0},
}
DOCUMENTS_PER_DOMAIN = 5
# Machine and versions are recorded per part, as parts may come from different runs.
ABOUT = ("date", "commit", "has_changes", "arguments", "dtype", "machine")


class Pair(NamedTuple):
    """Weight types of target and draft, and whether both embeddings are int8."""

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


# For the bounds: published sizes of target and draft; assumed acceptance rates; and the
# size of a trimmed vocabulary.
CEILING_PAIRS = (("9b", "2b"), ("27b", "2b"))
CEILING_ACCEPTANCE, CEILING_TRIMMED = 0.8, 32_768
# Largest K that is considered.
CEILING_DRAFTS = 16


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tables", action="store_true", help="only print the recorded tables")
    add("--corpus", type=Path, help="folder with valid.jsonl.xz")
    add(
        "--documents", type=int, default=40, help="approximate number, from all domains"
    )
    add("--length", type=int, default=256, help="tokens per piece of a document")
    add("--rows", type=int, default=4, help="pieces per batch")
    add("--num-tokens", type=int, default=128, help="new tokens of every request")
    add("--num-prompts", type=int, default=8, help="approximate number, evenly chosen")
    add("--num-speculative-tokens", type=int, default=4)
    add("--repeats", type=int, default=5, help="runs of every prompt in every mode")
    add("--dtype", default="float32")
    add("--skip-speed", action="store_true", help="skip speeds")
    add("--skip-quality", action="store_true", help="skip quality")
    add("--skip-acceptance", action="store_true", help="skip acceptance by KV type")
    add(
        "--trimmed",
        action="store_true",
        help="measure only the acceptance with a trimmed LM head",
    )
    add("--other-map", type=Path, help="a token map to compare with the draft's own")
    add("--output", type=Path, default=PATH)
    return parser


def main() -> None:
    options = make_parser().parse_args()
    if options.tables:
        record = json.loads(options.output.read_text(encoding="utf-8"))
        tables = speed_lines(record), ceiling_lines(), trimmed_lines(record)
        print("\n\n".join("\n".join(lines) for lines in tables))
        return
    if options.trimmed:
        options.skip_quality = options.skip_acceptance = options.skip_speed = True
    if options.corpus is None and (options.trimmed or not options.skip_quality):
        raise SystemExit("--corpus FOLDER is required: the folder with valid.jsonl.xz")
    device = warn_unless_quiet()
    quality = [] if options.skip_quality else list(measure_quality(options))
    every = list(bundled("prompts.jsonl"))
    prompts = every[:: max(len(every) // options.num_prompts, 1)]
    parts: dict[str, Any] = {} if options.skip_quality else {"quality": quality}
    if options.trimmed:
        parts["trimmed"] = list(measure_trimmed(options))
    if not options.skip_acceptance:
        parts["acceptance"] = list(measure_acceptance(prompts, options))
    engines = [] if options.skip_speed else [engine_of(pair, options) for pair in PAIRS]
    if engines:
        speed = parts[f"speed_{options.dtype}"] = list(
            measure_speed(engines, prompts, options)
        )
        for row in speed:
            print(json.dumps(row))
    engine = engines[0] if engines else make_engine(options)
    head = header("quantization", engine, options, device)
    kept = kept_parts(options.output, list(parts))
    result: dict[str, Any] = kept | head | {"draft": DRAFT} | parts
    about = {name: head[name] for name in ABOUT}
    result["measured"] |= dict.fromkeys(parts, about)
    options.output.write_text(json.dumps(result) + "\n", encoding="utf-8")


def measure_quality(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row per weight type, the original first."""
    folder = model_folder(TARGET, "model")
    texts = chosen(read_texts(options.corpus / "valid.jsonl.xz"), options.documents)
    tokenizer = Tokenizer.from_folder(str(folder))
    pieces = cut(texts, tokenizer.encode, length=options.length, num_rows=options.rows)
    if not len(pieces):
        raise SystemExit(
            f"too few documents have {options.length} tokens: lower --length"
        )
    mesh = make_mesh(1)
    plain = Reader(folder, mesh, dtype=options.dtype)
    for kind, has_embedding, kv_kind in FORMS:
        reader = Reader(
            folder,
            mesh,
            kind=kind,
            has_embedding=has_embedding,
            kv_kind=kv_kind,
            dtype=options.dtype,
        )
        title = f"weights {kind or 'as they are'}, keys and values {kv_kind}"
        found = compare(plain, reader, pieces, num_rows=options.rows, title=title)
        row = {
            "kind": kind,
            "has_int8_embedding": has_embedding,
            "kv_cache_dtype": kv_kind,
            "weight_bytes": reader.num_bytes,
            "num_tokens": found.num_tokens,
            "perplexity": found.perplexity,
            "kl_nats_per_token": found.kl_nats_per_token,
            "share_of_same_first": found.share_of_same_first,
        }
        print(json.dumps(row))
        yield row


def measure_acceptance(
    prompts: list[tuple[str, str]], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield acceptance by KV cache type, greedy and sampled.

    K is fixed, and nothing is timed.
    """
    plain_texts: dict[str, list[list[int]]] = {}
    for kv_kind in KV_KINDS:
        engine = engine_of(PAIRS[0], options, kv_cache_dtype=kv_kind)
        for mode, controls in MODES.items():
            counts, texts = accepted(engine, prompts, controls, options, kv_kind)
            first = plain_texts.setdefault(mode, texts)
            row = {"kv_cache_dtype": kv_kind, "mode": mode, **counts}
            row |= equal_texts(texts, first)
            print(json.dumps(row))
            yield row


def measure_trimmed(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row per LM head, prompt set and mode; heads must not change texts."""
    prompts = {
        "prompts": list(bundled("prompts.jsonl")),
        "documents": [
            (domain, text)
            for domain, texts in load_prompts(
                options.corpus, DOCUMENTS_PER_DOMAIN
            ).by_domain.items()
            for text in texts
        ],
    }
    plain_texts: dict[tuple[str, str], list[list[int]]] = {}
    heads: list[tuple[int | None, str | None]] = [(size, None) for size in HEADS]
    if options.other_map is not None:
        heads.append((TRIMMED, str(options.other_map)))
    for size, token_map in heads:
        pair = Pair(None, None, draft_vocab_size=size)
        engine = engine_of(pair, options, token_map=token_map)
        for name, mode in itertools.product(prompts, HEAD_MODES):
            controls = HEAD_MODES[mode]
            label = f"{size or 'all'} tokens, {name}, {mode}"
            counts, texts = accepted(engine, prompts[name], controls, options, label)
            first = plain_texts.setdefault((name, mode), texts)
            row = {
                "draft_vocab_size": size,
                "has_other_map": token_map is not None,
                "prompts": name,
                "mode": mode,
                **counts,
                **equal_texts(texts, first),
            }
            print(json.dumps(row))
            yield row
        engine.shutdown()


def accepted(
    engine: LLMEngine,
    prompts: list[tuple[str, str]],
    controls: dict[str, Any],
    options: argparse.Namespace,
    label: str,
) -> tuple[dict[str, Any], list[list[int]]]:
    """Run one request after the other; return acceptance counts and texts."""
    # Wait for all programs: until they are compiled, some rounds have no drafts.
    engine.start_warm_up()
    engine.wait_for_programs()
    before, texts = Acceptance.of(engine.stats), []
    for _, prompt in tqdm(prompts, desc=label):
        params = sampling(
            options.num_tokens, options.num_speculative_tokens, **controls
        )
        texts.append(list(run_one(engine, prompt, params)))
    found = Acceptance.of(engine.stats) - before
    counts = {
        "num_drafts": found.num_drafts,
        "num_draft_tokens": found.num_draft_tokens,
        "num_accepted": found.num_accepted,
        "acceptance_rate": found.num_accepted / found.num_draft_tokens,
        "mean_acceptance_length": 1 + found.num_accepted / found.num_drafts,
    }
    return counts, texts


def equal_texts(texts: list[list[int]], first: list[list[int]]) -> dict[str, int]:
    same = sum(one == other for one, other in zip(first, texts, strict=True))
    return {"same_texts": same, "num_texts": len(texts)}


def run_one(engine: LLMEngine, prompt: str, params: SamplingParams) -> Sequence[int]:
    """Return the tokens of a single request."""
    engine.add_request("0", prompt, params)
    while True:
        for output in engine.step():
            if output.finished:
                return output.outputs[0].token_ids


def measure_speed(
    engines: list[LLMEngine],
    prompts: list[tuple[str, str]],
    options: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """Yield a row per pair of types; all engines take turns at every prompt."""
    runs: list[list[PromptRuns]] = [[] for _ in PAIRS]
    for prompt in tqdm(prompts, desc="prompts"):
        for engine, own in zip(engines, runs, strict=True):
            own += run_prompts(engine, [prompt], options, GREEDY)
    first = summarise(runs[0])
    for pair, engine, own in zip(PAIRS, engines, runs, strict=True):
        found = summarise(own)
        plan = engine.runner.memory
        assert plan is not None, "the engine has no memory plan"
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


def pass_bytes(size: str, kind: str | None, num_logits: int | None = None) -> float:
    """Return the bytes of weights that a pass of a published size reads.

    Args:
        kind: Weight type of its matrices; if quantized, the embedding, used as LM head,
            is int8.
        num_logits: Rows of the LM head; None: all.
    """
    config = published_config(size)
    sizes = Sizes(
        vocab_size=num_logits or config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_q_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
    )
    total = 0.0
    for name, shape in tensor_shapes(sizes).items():
        if kind is None or len(shape) < 2:
            total += 2 * np.prod(shape)
            continue
        scheme = named_scheme("int8" if name == EMBEDDING else kind)
        bits = 4 if scheme.kind == "int4" else 8
        rows, features = shape
        total += rows * (features * bits / 8 + 4 * scheme.num_groups(features))
    return total


def ceiling_lines() -> list[str]:
    """Return a table of upper bounds of the speed-up of bfloat16 targets."""
    names = [f"{target}<-{draft}" for target, draft in CEILING_PAIRS]
    columns = [f"{name}{more}" for name in names for more in ("", ", trimmed")]
    lines = [f"| draft | {' | '.join(columns)} |", "|---|" + "--:|" * len(columns)]
    for kind in (None, "int8", "int4"):
        cells = [kind or "bfloat16"]
        for target, draft in CEILING_PAIRS:
            for num_logits in (None, CEILING_TRIMMED):
                cost = pass_bytes(draft, kind, num_logits) / pass_bytes(target, None)
                rates = [CEILING_ACCEPTANCE] * CEILING_DRAFTS
                count, best = best_num_draft_tokens(rates, cost)
                cells.append(f"{best:.2f} (K = {count})")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def speed_lines(record: dict[str, Any]) -> list[str]:
    """Return the table of all timed pairs, in both arithmetic types."""
    kinds = ("float32", "bfloat16")
    lines = [
        "| target | draft | megabytes | accepted | "
        + " | ".join(f"{kind}: plain | with drafts" for kind in kinds)
        + " |",
        "|---|---|--:|--:|" + "--:|--:|" * len(kinds),
    ]
    for rows in zip(*(record[f"speed_{kind}"] for kind in kinds), strict=True):
        first = rows[0]
        more = ", embedding int8" if first["has_int8_embedding"] else ""
        size = first["draft_vocab_size"]
        trimmed = f", {size:,} tokens" if size else ""
        target, draft = (first[name] or "bfloat16" for name in ("target", "draft"))
        cells = [
            target + (more if first["target"] else ""),
            draft + (more if first["draft"] else "") + trimmed,
            f"{first['target_bytes'] / 1e6:.1f} + {first['draft_bytes'] / 1e6:.1f}",
            f"{100 * first['acceptance_rate']:.1f} %",
        ]
        for row in rows:
            for name in ("plain", "speculative"):
                speed, ratio = row[f"{name}_tokens_per_s"], row[f"{name}_ratio"]
                cells.append(f"{speed:.0f} ({ratio:.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def trimmed_lines(record: dict[str, Any]) -> list[str]:
    """Return the table of acceptance with trimmed LM heads."""
    columns = list(itertools.product(("prompts", "documents"), HEAD_MODES))
    lines = [
        "| of 8,192 tokens | "
        + " | ".join(f"{name}, {mode}" for name, mode in columns)
        + " | same texts |",
        "|---|" + "--:|" * (len(columns) + 1),
    ]
    heads: dict[tuple[int | None, bool], dict[tuple[str, str], dict[str, Any]]] = {}
    for row in record["trimmed"]:
        own = heads.setdefault((row["draft_vocab_size"], row["has_other_map"]), {})
        own[row["prompts"], row["mode"]] = row
    for (size, has_other_map), own in heads.items():
        name = (f"{size:,}" if size else "all") + ", other map" * has_other_map
        rates = [f"{100 * own[column]['acceptance_rate']:.1f} %" for column in columns]
        same, count = (
            sum(own[column][name] for column in columns)
            for name in ("same_texts", "num_texts")
        )
        lines.append(f"| {' | '.join((name, *rates, f'{same} of {count}'))} |")
    return lines


def engine_of(
    pair: Pair,
    options: argparse.Namespace,
    *,
    token_map: str | None = None,
    **changes: Any,
) -> LLMEngine:
    """Make an engine of a pair.

    Args:
        token_map: A token map that replaces the draft's own.
    """
    return make_engine(
        options,
        **changes,
        quantization=pair.target,
        quantize_embedding=pair.has_int8_embedding,
        speculative_config={
            "model": DRAFT,
            "quantization": pair.draft,
            "draft_vocab_size": pair.draft_vocab_size,
            **({} if token_map is None else {"draft_token_map": token_map}),
            "num_speculative_tokens": options.num_speculative_tokens,
            "controller": "fixed",
        },
    )


if __name__ == "__main__":
    main()
