"""Owns what `serve` is asked to do: flags into loads, prompts, an address, a file."""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.bench.data import Prompt
from jaxspec.bench.flags import dataset
from jaxspec.bench.online.client import CHAT_ENDING
from jaxspec.bench.online.connection import Address
from jaxspec.bench.online.serve_report import TITLES, Wanted
from jaxspec.bench.online.traffic import Load
from jaxspec.bench.plot import check_plot
from jaxspec.bench.report import check_writable
from jaxspec.errors import ConfigError, check_integer, check_number, wrong_argument

ENDINGS = ("/completions", CHAT_ENDING)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A command line that has been checked.

    Attributes:
        loads: One, or the points of a sweep.
    """

    options: argparse.Namespace
    address: Address
    wanted: Wanted
    loads: list[Load]
    prompts: list[Prompt]

    def save(self, entry: dict[str, Any], load: Load) -> None:
        """Write the line of one point, where that was asked for.

        A sweep into a file that was named is a line for every point.
        """
        path = _saved_to(self.options, load)
        if path is None:
            return
        is_later = self.options.result_filename and load is not self.loads[0]
        mode = "a" if self.options.append_result or is_later else "w"
        with path.open(mode, encoding="utf-8") as file:
            file.write(json.dumps(entry, allow_nan=False) + "\n")


def read_task(options: argparse.Namespace) -> Task:
    """Check everything that can be wrong before anything is sent.

    Raises:
        ConfigError: Names the flag, its value and the allowed ones.
    """
    if not options.endpoint.startswith("/") or not options.endpoint.endswith(ENDINGS):
        allowed = "a path that ends in /completions or /chat/completions"
        raise wrong_argument(ConfigError, "--endpoint", allowed, options.endpoint)
    check_integer(ConfigError, "--num-prompts", options.num_prompts, low=1)
    check_integer(ConfigError, "--output-len", options.output_len, low=1)
    check_integer(ConfigError, "--num-warmups", options.num_warmups, low=0)
    check_number(ConfigError, "--burstiness", options.burstiness, low=0, open_low=True)
    for rate in options.request_rate:
        if not rate > 0:
            allowed = "above 0, or inf"
            raise wrong_argument(ConfigError, "--request-rate", allowed, rate)
    for limit in options.max_concurrency or ():
        check_integer(ConfigError, "--max-concurrency", limit, low=1)
    loads = [
        Load(
            request_rate=rate,
            max_concurrency=limit,
            burstiness=options.burstiness,
            seed=options.seed,
        )
        for rate in options.request_rate
        for limit in options.max_concurrency or (None,)
    ]
    _saved_to(options, loads[0])
    check_plot(options.plot)
    host = options.host
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return Task(
        options=options,
        address=Address.from_url(options.base_url or f"http://{host}:{options.port}"),
        wanted=_wanted(options),
        loads=loads,
        prompts=dataset(options).prompts(options.num_prompts),
    )


def _wanted(options: argparse.Namespace) -> Wanted:
    metrics = [name for name in options.percentile_metrics.split(",") if name]
    for name in metrics:
        if name not in TITLES:
            allowed = f"some of {','.join(TITLES)}"
            raise wrong_argument(ConfigError, "--percentile-metrics", allowed, name)
    allowed = "numbers from 0 to 100, with commas between"
    try:
        shares = [float(share) for share in options.metric_percentiles.split(",")]
    except ValueError as error:
        told = options.metric_percentiles
        raise wrong_argument(
            ConfigError, "--metric-percentiles", allowed, told
        ) from error
    for share in shares:
        check_number(ConfigError, "--metric-percentiles", share, low=0, high=100)
    return Wanted(metrics=metrics, percentiles=shares, goodput_ms=_goodput(options))


def _goodput(options: argparse.Namespace) -> dict[str, float]:
    allowed = "NAME:MILLISECONDS, of ttft, tpot and e2el"
    found = {}
    for told in options.goodput or ():
        name, _, limit = told.partition(":")
        if name not in ("ttft", "tpot", "e2el"):
            raise wrong_argument(ConfigError, "--goodput", allowed, told)
        try:
            found[name] = float(limit)
        except ValueError as error:
            raise wrong_argument(ConfigError, "--goodput", allowed, told) from error
        check_number(ConfigError, "--goodput", found[name], low=0)
    return found


def _saved_to(options: argparse.Namespace, load: Load) -> Path | None:
    """Where a point is saved; None for nowhere."""
    if not (options.save_result or options.append_result or options.save_detailed):
        return None
    name = options.result_filename
    if name is None:
        limit = load.max_concurrency or "any"
        now = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        name = f"serve-{load.request_rate:g}qps-concurrency{limit}-{now}.json"
    path = options.result_dir / name
    check_writable(path, "--result-dir")
    return path
