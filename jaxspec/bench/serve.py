"""`serve`: measure any server with OpenAI's API, at one load or over a sweep.

A jaxspec server is measured twice at every load, with and without drafts.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from jaxspec.bench import serve_report
from jaxspec.bench.client import (
    CHAT_ENDING,
    Answer,
    Client,
    HttpError,
    fetch,
    server_url,
)
from jaxspec.bench.data import Prompt
from jaxspec.bench.flags import dataset
from jaxspec.bench.report import BenchError, check_writable, header, table
from jaxspec.bench.scrape import Scrape, read_scrape
from jaxspec.bench.serve_report import TITLES, Wanted
from jaxspec.bench.traffic import Load, send
from jaxspec.command_line import bearer
from jaxspec.errors import ConfigError, check_integer, check_number, wrong_argument
from jaxspec.sampling_params import SAMPLING_FIELDS, SamplingParams

ENDINGS = ("/completions", CHAT_ENDING)
POLL_S = 1.0
MAX_COMPILING_RUNS = 4
SERVED, PLAIN = "as served", "plain"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A checked command line.

    Attributes:
        url: URL of the server.
        loads: One, or the points of a sweep.
    """

    options: argparse.Namespace
    url: str
    wanted: Wanted
    loads: list[Load]
    prompts: list[Prompt]

    def save(self, entry: dict[str, Any], load: Load) -> None:
        """Write the result of one load, if requested.

        A sweep into one named file has a line per load.
        """
        path = _saved_to(self.options, load)
        if path is None:
            return
        is_later = self.options.result_filename and load is not self.loads[0]
        with path.open("a" if is_later else "w", encoding="utf-8") as file:
            file.write(json.dumps(entry, allow_nan=False) + "\n")


@dataclass(frozen=True, kw_only=True)
class Site:
    """A server that responds.

    Attributes:
        has_metrics: Its /metrics reports drafts or compiles.
        has_plain: Every load is also measured without drafts.
    """

    client: Client
    has_metrics: bool
    has_plain: bool

    async def scrape(self) -> Scrape:
        """Return the server's current counts."""
        if not self.has_metrics:
            return Scrape()
        text = await fetch(f"{self.client.url}/metrics", self.client.headers)
        return read_scrape(text)

    async def scrape_idle(self) -> Scrape:
        """Wait until the server compiles nothing; return its counts."""
        found = await self.scrape()
        if found.num_warming:
            print(
                f"The server is compiling {found.num_warming} programs", file=sys.stderr
            )
        while found.num_warming:
            await asyncio.sleep(POLL_S)
            found = await self.scrape()
        return found


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the subcommand; return the results that `--json` prints.

    Raises:
        ArgumentError: A flag is invalid; nothing was sent.
        BenchError: The server does not respond.
    """
    task = read_task(options)
    try:
        return asyncio.run(_run(task))
    except HttpError as error:
        raise BenchError(str(error)) from error


def read_task(options: argparse.Namespace) -> Task:
    """Check all flags before anything is sent.

    Raises:
        ConfigError: Names the flag, its value and the allowed values.
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
    host = options.host
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return Task(
        options=options,
        url=server_url(options.base_url or f"http://{host}:{options.port}"),
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
    flag, text = "--metric-percentiles", options.metric_percentiles
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError as error:
        allowed = "numbers from 0 to 100, separated by commas"
        raise wrong_argument(ConfigError, flag, allowed, text) from error
    for share in shares:
        check_number(ConfigError, flag, share, low=0, high=100)
    limits = {}
    for entry in options.goodput or ():
        name, _, limit = entry.partition(":")
        allowed = "NAME:MILLISECONDS, of ttft, tpot and e2el"
        try:
            limits[name] = float(limit)
        except ValueError as error:
            raise wrong_argument(ConfigError, "--goodput", allowed, entry) from error
        if name not in ("ttft", "tpot", "e2el"):
            raise wrong_argument(ConfigError, "--goodput", allowed, entry)
        check_number(ConfigError, "--goodput", limits[name], low=0)
    return Wanted(metrics=metrics, percentiles=shares, goodput_ms=limits)


def _saved_to(options: argparse.Namespace, load: Load) -> Path | None:
    """Return the path of the file for a load's result; None if none is requested."""
    if not (options.save_result or options.save_detailed):
        return None
    name = options.result_filename
    if name is None:
        limit = load.max_concurrency or "any"
        now = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        name = f"serve-{load.request_rate:g}qps-concurrency{limit}-{now}.json"
    path = options.result_dir / name
    check_writable(path, "--result-dir")
    return path


async def _run(task: Task) -> list[dict[str, Any]]:
    site = await _open(task)
    for prompt in task.prompts[: task.options.num_warmups]:
        await site.client.ask(prompt)
    modes: dict[str, dict[str, Any]] = {SERVED: {}}
    if site.has_plain:
        modes[PLAIN] = {"num_speculative_tokens": 0}
    points, entries = [], []
    for number, load in enumerate(task.loads):
        # The modes alternate, so that a slow phase of the machine affects both.
        names = list(modes)[:: -1 if number % 2 else 1]
        found = {name: await _point(task, site, modes[name], load) for name in names}
        for name in modes:
            print(f"\n{_name_of(load)}, {name}:" if site.has_plain else "")
            print(serve_report.block(found[name], load, task.wanted))
        if site.has_plain and "spec_decode_num_drafts" not in found[SERVED]:
            print("No drafts were made at this load.")
        entry = _entry(task, site, load, found)
        task.save(entry, load)
        entries.append(entry)
        points += [(load, name, found[name]) for name in modes]
    if len(points) > 1:
        print(f"\n{sweep_table(points, task.wanted)}")
    return entries


async def _point(
    task: Task, site: Site, fields: Mapping[str, Any], load: Load
) -> dict[str, Any]:
    """Measure one load; repeat a run in which the server compiled something."""
    for _ in range(MAX_COMPILING_RUNS):
        before = await site.scrape_idle()
        answers, seconds = await _send(task, site, fields, load)
        after = await site.scrape_idle()
        if after.num_compiles == before.num_compiles:
            break
        print("The server compiled programs: this run is repeated", file=sys.stderr)
    else:
        raise BenchError(
            f"The server compiled programs in {MAX_COMPILING_RUNS} runs in a row: "
            "start it with --warm-up all."
        )
    errors = [answer.error for answer in answers if answer.error]
    if len(errors) == len(answers):
        raise BenchError(
            f"All {len(errors)} requests failed, the first with {errors[0]}"
        )
    drafts = after.acceptance
    if drafts is not None and before.acceptance is not None:
        drafts -= before.acceptance
    if drafts is not None and not drafts.num_drafts:
        drafts = None
    found = serve_report.figures(answers, seconds, task.wanted, drafts)
    if drafts is not None and after.forced_acceptance is not None:
        found["forced_acceptance"] = list(after.forced_acceptance)
    if task.options.save_detailed:
        found |= serve_report.details(answers)
    return found


async def _send(
    task: Task, site: Site, fields: Mapping[str, Any], load: Load
) -> tuple[list[Answer], float]:
    if site.has_plain:
        # Without this reset the second run would find the first run's prompts in the
        # prefix cache.
        fields = {**fields, "cache_salt": f"bench-{time.time_ns()}"}
    fields = {**site.client.fields, **fields}
    client = dataclasses.replace(site.client, fields=fields)
    name = _name_of(load)
    total = len(task.prompts)
    with tqdm(total=total, desc=name, dynamic_ncols=True, disable=None) as bar:
        return await send(task.prompts, load, client.ask, bar.update)


async def _open(task: Task) -> Site:
    """Wait until a request succeeds; find the model's name and the metrics."""
    limit_s, headers = (
        task.options.ready_check_timeout_sec,
        bearer(task.options.api_key),
    )
    end, has_warned = time.monotonic() + limit_s, False
    while True:
        client, reason, status = await _try(task, headers)
        if client is not None:
            break
        # Retry while the server is busy or starting, but not after it has refused the
        # request.
        is_refused = status is not None and 400 <= status < 500 and status != 429
        if is_refused or time.monotonic() >= end:
            raise BenchError(f"No request succeeded: {reason}")
        if not has_warned:
            print(
                f"Waiting up to {limit_s:g} s for the server: {reason}", file=sys.stderr
            )
            has_warned = True
        await asyncio.sleep(POLL_S)
    found, has_plain = Scrape(), task.options.compare_plain
    with contextlib.suppress(HttpError, ValueError):  # not every server has metrics
        found = read_scrape(await fetch(f"{task.url}/metrics", headers))
    if has_plain is None:
        has_plain = found.acceptance is not None and found.num_compiles is not None
    return Site(client=client, has_metrics=found != Scrape(), has_plain=has_plain)


async def _try(
    task: Task, headers: Mapping[str, str]
) -> tuple[Client | None, str, int | None]:
    """Return a client if a request succeeds; else None, the reason and the status."""
    options = task.options
    try:
        model = options.model or await _first_model(task.url, headers)
    except HttpError as error:
        return None, str(error), error.status
    client = Client(
        url=task.url,
        endpoint=options.endpoint,
        fields=_fields(options, model),
        headers=headers,
    )
    answer = await client.ask(task.prompts[0])
    return (None if answer.error else client), answer.error, answer.status


async def _first_model(url: str, headers: Mapping[str, str]) -> str:
    text = await fetch(f"{url}/v1/models", headers)
    try:
        return json.loads(text)["data"][0]["id"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise HttpError(f"/v1/models names no model: {text[:200]!r}") from error


def _fields(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """Return the fields of every request, without those that have default values."""
    fields: dict[str, Any] = {
        "model": model,
        "max_tokens": options.output_len,
        "temperature": options.temperature,
    }
    neutral = SamplingParams()
    for name in (*SAMPLING_FIELDS, "ignore_eos"):
        if getattr(options, name) != getattr(neutral, name):
            fields[name] = getattr(options, name)
    return fields | options.extra_body


def _entry(
    task: Task, site: Site, load: Load, found: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return the result of one load: vLLM's keys, and the plain run as a field."""
    rate, options = load.request_rate, task.options
    is_chat = options.endpoint.endswith(CHAT_ENDING)
    entry = header("serve", options) | {
        "backend": "openai-chat" if is_chat else "openai",
        "model_id": site.client.fields["model"],
        "num_prompts": options.num_prompts,
        "request_rate": rate if math.isfinite(rate) else "inf",
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        **found[SERVED],
    }
    return entry | ({PLAIN: found[PLAIN]} if PLAIN in found else {})


def sweep_table(
    points: Sequence[tuple[Load, str, dict[str, Any]]], wanted: Wanted
) -> str:
    """Format one row per load: throughput and median times."""
    times = [f"{metric.upper()} ms" for metric in wanted.metrics]
    rows = [["load", "mode", "tokens/s", *times]]
    for load, mode, found in points:
        medians = [f"{found[f'median_{metric}_ms']:.2f}" for metric in wanted.metrics]
        speed = f"{found['output_throughput']:.1f}"
        rows.append([_name_of(load), mode, speed, *medians])
    return table(rows)


def _name_of(load: Load) -> str:
    limit = "any" if load.max_concurrency is None else str(load.max_concurrency)
    return f"{load.request_rate:g} requests/s, concurrency {limit}"
