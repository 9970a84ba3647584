"""Parts of `benchmarks.device` that run whole engines: texts, acceptance, bits, speed.

`lossless` compares the texts of all ways to propose drafts with those of plain
decoding; a draft model equal to the target must have all its drafts accepted.
`batch_invariant` compares the logprobs of requests alone, together and with drafts, bit
by bit. The models are the bundled pair, or another target with `--model`. `real_model`
measures Gemma 3 270M, if its package is installed. The log shows the compile time of
every program.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks.device_steps import Row, SkippedError, measure_copy
from benchmarks.measure import bundled
from jaxspec import LLM, SamplingParams
from jaxspec.engine.model_folders import (
    BUNDLED_DRAFT,
    BUNDLED_TARGET,
    PACKAGED_GEMMA3,
)
from jaxspec.outputs import RequestOutput
from jaxspec_checkpoints import packaged_gemma3
from jaxspec_checkpoints.errors import CheckpointError

EAGLE3, MEDUSA = f"{BUNDLED_TARGET}-eagle3", f"{BUNDLED_TARGET}-medusa"
# Methods by name. Every round drafts the maximum, so that no text is plain by choice.
METHODS: dict[str, dict[str, Any]] = {
    "draft model": {"model": BUNDLED_DRAFT, "num_speculative_tokens": 5},
    "draft model, int8": {
        "model": BUNDLED_DRAFT,
        "num_speculative_tokens": 5,
        "quantization": "int8",
    },
    "draft model, tree": {
        "model": BUNDLED_DRAFT,
        "speculative_token_tree": "[(0,),(1,),(0,0),(0,1),(1,0),(0,0,0)]",
    },
    "ngram": {
        "method": "ngram",
        "prompt_lookup_max": 4,
        "num_speculative_tokens": 4,
    },
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "eagle3": {"method": "eagle3", "model": EAGLE3, "num_speculative_tokens": 4},
    "medusa": {"method": "medusa", "model": MEDUSA},
    "target as draft": {"model": BUNDLED_TARGET, "num_speculative_tokens": 4},
}
NEEDS_NO_MODEL = ("ngram", "suffix")
SAMPLINGS = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "seed": 11}}


class Engine:
    """An engine whose programs are compiled anew, before anything is measured."""

    def __init__(self, options: argparse.Namespace, dtype: str, **arguments: Any):
        self._options = options
        self._compiled_for: set[frozenset[str]] = set()
        given: dict[str, Any] = {
            "max_model_len": 1024,
            "max_num_seqs": options.num_prompts,
            "num_gpu_blocks_override": 2048,
            "compilation_cache_dir": None,
        }
        self._llm = LLM(options.model, dtype=dtype, **(given | arguments))

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception: object) -> None:
        self._llm.__exit__(*exception)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, which a plain step reads once."""
        leaves = jax.tree.leaves(self._llm.llm_engine.runner.params)
        return sum(leaf.nbytes for leaf in leaves)

    def generate(self, texts: list[str], **sampling: Any) -> list[RequestOutput]:
        """Generate `--num-tokens` tokens for each prompt, with compiled programs."""
        given = {"logprobs": 1, "ignore_eos": True} | sampling
        kind = frozenset(given)
        if kind not in self._compiled_for:
            few = SamplingParams(max_tokens=4, **given)
            for chosen in (texts, texts[:1]):
                self._llm.generate(chosen, few, use_tqdm=False)
                self._llm.wait_for_programs()
            self._compiled_for.add(kind)
        params = SamplingParams(max_tokens=self._options.num_tokens, **given)
        return self._llm.generate(texts, params, use_tqdm=False)

    def speed(self, texts: list[str]) -> Row:
        """Return greedy tokens/s of one request and of all, medians of three runs."""
        row: Row = {"what": "speed"}
        for number, chosen in (("one", texts[:1]), ("all", texts)):
            seconds = []
            for _ in range(4):  # the first compiles and warms
                begin = time.perf_counter()
                self.generate(chosen, temperature=0.0, logprobs=None)
                seconds.append(time.perf_counter() - begin)
            count = len(chosen) * self._options.num_tokens
            row[f"{number}_tokens_per_s"] = count / statistics.median(seconds[1:])
        return row


def prompts(options: argparse.Namespace) -> list[str]:
    """Return `--num-prompts` prompts of the repository, repeated if there are fewer."""
    found = [text for _, text in bundled("prompts.jsonl")]
    return (found * (1 + options.num_prompts // len(found)))[: options.num_prompts]


def tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def first_difference(one: list[int], other: list[int]) -> int | None:
    pairs = enumerate(zip(one, other, strict=True))
    return next((at for at, (left, right) in pairs if left != right), None)


def lossless(options: argparse.Namespace) -> Iterator[Row]:
    """Compare the texts of every method with those of plain decoding."""
    names = options.methods or (
        METHODS if options.model == BUNDLED_TARGET else NEEDS_NO_MODEL
    )
    texts = prompts(options)
    for dtype in options.dtypes:
        with Engine(options, dtype) as engine:
            plain = {
                name: engine.generate(texts, **sampling)
                for name, sampling in SAMPLINGS.items()
            }
            yield engine.speed(texts) | {"method": "plain", "dtype": dtype}
        for method in names:
            yield from _method(method, dtype, texts, plain, options)


def _method(
    method: str,
    dtype: str,
    texts: list[str],
    plain: dict[str, list[RequestOutput]],
    options: argparse.Namespace,
) -> Iterator[Row]:
    row = {"what": "lossless", "method": method, "dtype": dtype}
    config = METHODS[method] | {"controller": "fixed"}
    with Engine(options, dtype, speculative_config=config) as engine:
        for name, sampling in SAMPLINGS.items():
            outputs = engine.generate(texts, **sampling)
            yield row | {"sampling": name} | _compare(plain[name], outputs)
        yield row | engine.speed(texts)


def _compare(plain: list[RequestOutput], outputs: list[RequestOutput]) -> Row:
    """Count equal texts; where one differs, give the gap between the two logprobs."""
    gaps, proposed, accepted = [], 0, 0
    for one, other in zip(plain, outputs, strict=True):
        metrics = other.outputs[0].spec_decode_metrics
        assert metrics is not None
        proposed += sum(metrics.num_proposed_per_position)
        accepted += metrics.num_accepted_draft_tokens
        at = first_difference(tokens(one), tokens(other))
        if at is not None:
            logprobs = one.outputs[0].logprobs
            assert logprobs is not None
            values = [entry.logprob for entry in (logprobs[at] or {}).values()]
            gaps.append({"position": at, "logprobs": values})
    return {
        "num_equal": len(plain) - len(gaps),
        "num_texts": len(plain),
        "differences": gaps[:8],
        "acceptance_rate": accepted / proposed if proposed else None,
    }


def batch_invariant(options: argparse.Namespace) -> Iterator[Row]:
    """Compare tokens and logprobs of requests alone, together and with drafts."""
    texts = prompts(options)
    config = METHODS["draft model"] | {"controller": "fixed"}
    for dtype in options.dtypes:
        for is_on in (True, False):
            row = {"what": "bits", "dtype": dtype, "batch_invariant": is_on}
            given: dict[str, Any] = {
                "batch_invariant": is_on,
                "enable_prefix_caching": False,
            }
            with Engine(options, dtype, **given) as engine:
                together = _bits(engine.generate(texts, temperature=0.0))
                alone = [engine.generate([one], temperature=0.0)[0] for one in texts]
                yield row | {"compared": "alone"} | _equal_bits(together, _bits(alone))
                yield row | engine.speed(texts) | {"method": "plain"}
            given["speculative_config"] = config
            with Engine(options, dtype, **given) as engine:
                drafted = _bits(engine.generate(texts, temperature=0.0))
                yield row | {"compared": "drafts"} | _equal_bits(together, drafted)
                yield row | engine.speed(texts) | {"method": "draft model"}


def _bits(outputs: list[RequestOutput]) -> list[list[tuple[int, float]]]:
    """Return token and logprob of every position of every text."""
    return [
        [
            (token, entry[token].logprob)
            for token, entry in zip(text.token_ids, text.logprobs or (), strict=True)
        ]
        for output in outputs
        for text in output.outputs
    ]


def _equal_bits(one: list[Any], other: list[Any]) -> Row:
    """Count equal texts, and texts whose logprobs are equal bit by bit too."""
    pairs = list(zip(one, other, strict=True))
    same_text = [[t for t, _ in left] == [t for t, _ in right] for left, right in pairs]
    return {
        "num_texts": len(pairs),
        "num_equal": sum(same_text),
        "num_equal_bits": sum(left == right for left, right in pairs),
        "largest_difference": max(
            (
                abs(a - b)
                for left, right in pairs
                for (s, a), (t, b) in zip(left, right, strict=False)
                if s == t
            ),
            default=0.0,
        ),
    }


def real_model(options: argparse.Namespace) -> Iterator[Row]:
    """Measure Gemma 3 270M, plain and with lookups, in bfloat16.

    The share of bandwidth is of one request: the engine's time counts, and the weights
    but not the KV are read bytes.
    """
    try:
        packaged_gemma3()
    except CheckpointError as error:
        raise SkippedError(str(error)) from error
    bandwidth = measure_copy(options)
    given = argparse.Namespace(**{**vars(options), "model": PACKAGED_GEMMA3})
    texts = prompts(given)
    for method in (None, *NEEDS_NO_MODEL):
        config = METHODS[method] | {"controller": "fixed"} if method else None
        with Engine(given, "bfloat16", speculative_config=config) as engine:
            row: dict[str, Any] = {"model": "270m", "method": method or "plain"}
            row |= {"dtype": "bfloat16"} | engine.speed(texts)
            if method is None:
                gb_per_s = row["one_tokens_per_s"] * engine.weight_bytes / 1e9
                row |= {"bytes_read": engine.weight_bytes}
                row |= {"share_of_bandwidth": gb_per_s / bandwidth}
            yield row
