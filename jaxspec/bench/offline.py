"""Common parts of `latency`, `throughput` and `spec`: engine, prompts, sampling.

Invalid arguments are rejected before the weights are read.
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm

from jaxspec.bench.data import Prompt
from jaxspec.bench.flags import dataset
from jaxspec.bench.measure import Batch, Bench
from jaxspec.bench.parts import (
    Parts,
    copy_bandwidth,
    cost_ratio,
    measure_parts,
)
from jaxspec.bench.report import check_writable, forced_line, header
from jaxspec.config.engine import EngineConfig
from jaxspec.engine.arg_utils import engine_args
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.loader import read_tokenizer
from jaxspec.errors import (
    ConfigError,
    RequestError,
    UnsupportedError,
    check_integer,
    check_number,
    wrong_argument,
)
from jaxspec.sampling_params import SAMPLING_FIELDS, RequestOutputKind, SamplingParams
from jaxspec.text.tokenizer import Tokenizer


@dataclass(kw_only=True)
class Offline:
    """The prompts and the engine of a benchmark without a server.

    Attributes:
        prompts: Token ids of each prompt.
    """

    options: argparse.Namespace
    engine: LLMEngine
    prompts: list[list[int]]

    @property
    def num_draft_tokens(self) -> int:
        """K as the engine is configured; 0 without speculation."""
        return self.engine.config.max_draft_tokens

    @property
    def forced_acceptance(self) -> list[float] | None:
        """Forced acceptance probability of each draft; None if drafts are verified."""
        speculative = self.engine.config.speculative
        forced = speculative.forced_acceptance if speculative else None
        return None if forced is None else list(forced)

    def new_result(self, benchmark: str) -> dict[str, Any]:
        """Return the header of a result, with its forced acceptance."""
        forced = {"forced_acceptance": self.forced_acceptance}
        return header(benchmark, self.options) | forced

    def print_label(self) -> None:
        """Print a warning if acceptance is forced."""
        if self.forced_acceptance is not None:
            print(forced_line(self.forced_acceptance))

    def must_agree(self, temperature: float) -> bool:
        """Return whether texts must equal those of plain decoding: greedy, verified."""
        return temperature == 0 and self.forced_acceptance is None

    def batch(
        self,
        num_draft_tokens: int,
        chosen: slice = slice(None),
        *,
        is_streamed: bool = True,
        **changes: Any,
    ) -> Batch:
        """Make requests for the chosen prompts, with at most K drafts per round."""
        prompts = self.prompts[chosen]
        params = sampling(
            self.options, num_draft_tokens, is_streamed=is_streamed, **changes
        )
        return Batch(prompts=prompts, params=[params] * len(prompts))

    @contextlib.contextmanager
    def bench(self, num_runs: int) -> Iterator[Bench]:
        """Yield a `Bench` with a progress bar of `num_runs` runs."""
        with tqdm(total=num_runs, desc="Runs", dynamic_ncols=True, disable=None) as bar:
            self.engine.announce_compiles(
                lambda program: bar.set_description(program or "Runs")
            )
            try:
                yield Bench(
                    engine=self.engine,
                    num_warmups=self.options.num_iters_warmup,
                    num_iters=self.options.num_iters,
                    advance=bar.update,
                )
            finally:
                self.engine.announce_compiles(None)

    def parts(self, size: int, draft_lengths: Sequence[int]) -> list[Parts]:
        """Measure the parts of a round of `size` sequences, for each draft length."""
        if not self.options.parts:
            return []
        title = f"Parts of a round, batch {size}"
        return [
            found
            for k in tqdm(draft_lengths, desc=title, disable=None)
            for found in measure_parts(self.engine, self.batch(k, slice(size)), [k])
        ]

    def device(self) -> dict[str, Any]:
        """Describe the devices: copy bandwidth, and cost of a draft / target pass."""
        runner = self.engine.runner
        devices = list(runner.mesh.devices.flat)
        return {
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "count": len(devices),
            "dtype": str(runner.dtype),
            "copy_bytes_per_s": copy_bandwidth(devices[0]) * len(devices),
            "cost_ratio": cost_ratio(self.engine),
        }


def sweep_of(options: argparse.Namespace) -> tuple[list[int], list[float]]:
    """Return batch sizes and temperatures; set `options` to the lowest temperature.

    Raises:
        ConfigError: A value is invalid, or nothing would be decoded.
    """
    sizes = sorted(set(options.batch_sizes))
    for size in sizes:
        check_integer(ConfigError, "--batch-sizes", size, low=1)
    temperatures = sorted(set(options.temperatures))
    for temperature in temperatures:
        check_number(ConfigError, "--temperatures", temperature, low=0, high=2)
    options.temperature = temperatures[0]
    check_integer(ConfigError, "--output-len", options.output_len, low=2)
    return sizes, temperatures


def open_offline(
    options: argparse.Namespace,
    *,
    num_prompts: int,
    num_seqs: int | None,
    change: Callable[[EngineConfig], EngineConfig] = lambda config: config,
    prompts: Sequence[Prompt] | None = None,
) -> Offline:
    """Check a command line, then load the engine and the prompts.

    Args:
        num_seqs: Sequences that must run concurrently; None for the flags' number.
        change: Changes the configuration of the flags.
        prompts: Prompts to run in place of those of the flags.

    Raises:
        ArgumentError: An argument is invalid; nothing was run.
    """
    for name in ("num_iters", "output_len"):
        flag = "--" + name.replace("_", "-")
        check_integer(ConfigError, flag, getattr(options, name), low=1)
    check_integer(ConfigError, "--num-iters-warmup", options.num_iters_warmup, low=0)
    check_writable(options.output_json, "--output-json")
    sampling(options, 0)
    config = change(engine_config(options, num_seqs))
    if config.data_parallel_size > 1:
        raise UnsupportedError(
            f"--data-parallel-size {config.data_parallel_size}: this measures one "
            "engine. Use `bench serve` with a server, which may have several.",
            parameter="data_parallel_size",
            value=config.data_parallel_size,
        )
    tokenizer = read_tokenizer(config)
    if prompts is None:
        prompts = dataset(options).prompts(num_prompts)
    token_ids = _token_ids(prompts, tokenizer, config, options.output_len)
    return Offline(
        options=options,
        engine=LLMEngine(config, tokenizer=tokenizer),
        prompts=token_ids,
    )


def sampling(
    options: argparse.Namespace,
    num_draft_tokens: int,
    *,
    is_streamed: bool = True,
    **changes: Any,
) -> SamplingParams:
    """Return the sampling parameters of the flags.

    Raises:
        RequestError: A value is invalid.
    """
    values: dict[str, Any] = {
        "max_tokens": options.output_len,
        "ignore_eos": options.ignore_eos,
        "detokenize": not options.disable_detokenize,
        **{name: getattr(options, name) for name in SAMPLING_FIELDS},
    }
    kind = RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY
    return SamplingParams(
        output_kind=kind,
        extra_args={"num_speculative_tokens": num_draft_tokens},
        **(values | changes),
    )


def engine_config(options: argparse.Namespace, num_seqs: int | None) -> EngineConfig:
    """Return the checked configuration of the flags.

    Args:
        num_seqs: As for `open_offline`.

    Raises:
        ArgumentError: An argument is invalid.
    """
    args = engine_args(vars(options))
    if num_seqs is not None:
        if args.max_num_seqs is not None and args.max_num_seqs < num_seqs:
            raise wrong_argument(
                ConfigError,
                "--max-num-seqs",
                f"at least {num_seqs}, the measured batch size",
                args.max_num_seqs,
            )
        args.max_num_seqs = args.max_num_seqs or num_seqs
    config = args.create_engine_config()
    probability = options.forced_acceptance
    return config if probability is None else _forced(config, probability)


def _forced(config: EngineConfig, probability: float) -> EngineConfig:
    check_number(ConfigError, "--forced-acceptance", probability, low=0, high=1)
    if config.speculative is None:
        raise ConfigError(
            "--forced-acceptance needs drafts, and these flags name none: give "
            "--speculative-model or --speculative-config.",
            parameter="--forced-acceptance",
            value=probability,
        )
    speculative = config.speculative.with_forced_acceptance(probability)
    return dataclasses.replace(config, speculative=speculative)


def _token_ids(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    config: EngineConfig,
    output_len: int,
) -> list[list[int]]:
    """Encode prompts; raise if prompt and output are too long."""
    found = [prompt.token_ids(tokenizer) for prompt in prompts]
    room = config.max_model_len - output_len
    longest = max(map(len, found))
    if longest > room:
        raise RequestError(
            f"A prompt of {longest} tokens and --output-len {output_len} are more than "
            f"max_model_len={config.max_model_len}: shorten one of them.",
            parameter="output_len",
            value=output_len,
        )
    return found
