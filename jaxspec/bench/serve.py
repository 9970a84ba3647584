"""Owns `serve`: requests to any server with OpenAI's API, at one load or over a sweep.

Against a server of jaxspec every load is measured twice, the second time with requests
that ask for no drafts.
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
from typing import Any

from tqdm.auto import tqdm

from jaxspec.bench.online import serve_report
from jaxspec.bench.online.client import CHAT_ENDING, Answer, Client
from jaxspec.bench.online.connection import Address, HttpError, fetch
from jaxspec.bench.online.scrape import Scrape, read_scrape
from jaxspec.bench.online.serve_report import Wanted
from jaxspec.bench.online.serve_task import Task, read_task
from jaxspec.bench.online.traffic import Load, send
from jaxspec.bench.plot import plot
from jaxspec.bench.report import BenchError, header, table
from jaxspec.command_line import bearer
from jaxspec.sampling_params import SAMPLING_FIELDS, SamplingParams

POLL_S = 1.0
MOST_COMPILING_RUNS = 4
SERVED, PLAIN = "as served", "plain"


@dataclass(frozen=True, kw_only=True)
class Site:
    """A server that answers.

    Attributes:
        has_metrics: At /metrics it tells of drafts or compiles.
        has_plain: Every load is measured without drafts as well.
    """

    client: Client
    has_metrics: bool
    has_plain: bool

    async def scrape(self) -> Scrape:
        """The server's counts so far."""
        if not self.has_metrics:
            return Scrape()
        text = await fetch(self.client.address, "/metrics", self.client.headers)
        return read_scrape(text)

    async def quiet(self) -> Scrape:
        """The same, once the server compiles nothing any more."""
        found = await self.scrape()
        if found.num_warming:
            print(f"The server makes {found.num_warming} programs", file=sys.stderr)
        while found.num_warming:
            await asyncio.sleep(POLL_S)
            found = await self.scrape()
        return found


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the subcommand; returns what `--json` prints.

    Raises:
        ArgumentError: A flag cannot work; nothing was sent.
        BenchError: The server does not answer.
    """
    task = read_task(options)
    try:
        return asyncio.run(_run(task))
    except HttpError as error:
        raise BenchError(str(error)) from error


async def _run(task: Task) -> list[dict[str, Any]]:
    site = await _open(task)
    for prompt in task.prompts[: task.options.num_warmups]:
        await site.client.ask(prompt)
    modes: dict[str, dict[str, Any]] = {SERVED: {}}
    if site.has_plain:
        modes[PLAIN] = {"num_speculative_tokens": 0}
    points, entries = [], []
    for number, load in enumerate(task.loads):
        # In turn, so that a slow moment of the machine hits both.
        names = list(modes)[:: -1 if number % 2 else 1]
        found = {name: await _point(task, site, modes[name], load) for name in names}
        for name in modes:
            print(f"\n{_where(load)}, {name}:" if site.has_plain else "")
            print(serve_report.block(found[name], load, task.wanted))
        if site.has_plain and "spec_decode_num_drafts" not in found[SERVED]:
            print("No drafts were made at this load.")
        entry = _entry(task, site, load, found)
        task.save(entry, load)
        entries.append(entry)
        points += [(load, name, found[name]) for name in modes]
    if len(points) > 1:
        print(f"\n{sweep_table(points, task.wanted)}")
    plot(entries, task.options.plot)
    return entries


async def _point(
    task: Task, site: Site, fields: Mapping[str, Any], load: Load
) -> dict[str, Any]:
    """One load, one way to ask; again if the server compiled something meanwhile."""
    for _ in range(MOST_COMPILING_RUNS):
        before = await site.quiet()
        answers, seconds = await _sent(task, site, fields, load)
        after = await site.quiet()
        if after.num_compiles == before.num_compiles:
            break
        print("The server compiled programs: this run does not count", file=sys.stderr)
    else:
        raise BenchError(
            f"The server compiled programs in {MOST_COMPILING_RUNS} runs in a row: "
            "start it with --warm-up all."
        )
    _check_some(answers)
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


async def _sent(
    task: Task, site: Site, fields: Mapping[str, Any], load: Load
) -> tuple[list[Answer], float]:
    if site.has_plain:
        # Or the second run would find the prompts of the first in the cache.
        fields = {**fields, "cache_salt": f"bench-{time.time_ns()}"}
    fields = {**site.client.fields, **fields}
    client = dataclasses.replace(site.client, fields=fields)
    with tqdm(total=len(task.prompts), desc=_where(load), dynamic_ncols=True) as bar:
        return await send(task.prompts, load, client.ask, bar.update)


def _check_some(answers: list[Answer]) -> None:
    errors = [answer.error for answer in answers if answer.error]
    if len(errors) == len(answers):
        raise BenchError(
            f"All {len(errors)} requests failed, the first with {errors[0]}"
        )


async def _open(task: Task) -> Site:
    """Wait until a request is answered; find the model's name and the metrics."""
    options, address = task.options, task.address
    headers = bearer(options.api_key)
    end = time.monotonic() + options.ready_check_timeout_sec
    is_told = False
    while True:
        client, reason, status = await _tried(task, headers)
        if client is not None:
            break
        # Busy, or not ready: that passes. A refusal does not.
        is_refused = status is not None and 400 <= status < 500 and status != 429
        if is_refused or time.monotonic() >= end:
            raise BenchError(f"The server answers no request: {reason}")
        if not is_told:
            limit_s = options.ready_check_timeout_sec
            print(
                f"Waiting up to {limit_s:g} s for the server: {reason}", file=sys.stderr
            )
            is_told = True
        await asyncio.sleep(POLL_S)
    found, has_plain = Scrape(), options.compare_plain
    with contextlib.suppress(HttpError, ValueError):  # a peer may have none, or others
        found = read_scrape(await fetch(address, "/metrics", headers))
    if has_plain is None:
        has_plain = found.acceptance is not None and found.num_compiles is not None
    return Site(client=client, has_metrics=found != Scrape(), has_plain=has_plain)


async def _tried(
    task: Task, headers: Mapping[str, str]
) -> tuple[Client | None, str, int | None]:
    """A client, once one request is answered; or why not, and the status."""
    options = task.options
    try:
        model = options.model or await _first_model(task.address, headers)
    except HttpError as error:
        return None, str(error), error.status
    client = Client(
        address=task.address,
        endpoint=options.endpoint,
        fields=_fields(options, model),
        headers=headers,
    )
    answer = await client.ask(task.prompts[0])
    return (None if answer.error else client), answer.error, answer.status


async def _first_model(address: Address, headers: Mapping[str, str]) -> str:
    text = await fetch(address, "/v1/models", headers)
    try:
        return json.loads(text)["data"][0]["id"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise HttpError(f"/v1/models names no model: {text[:200]!r}") from error


def _fields(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """What every request asks for; controls that are off are left out, for peers."""
    fields: dict[str, Any] = {
        "model": model,
        "max_tokens": options.output_len,
        "temperature": options.temperature,
    }
    off = SamplingParams()
    for name in (*SAMPLING_FIELDS, "ignore_eos"):
        if getattr(options, name) != getattr(off, name):
            fields[name] = getattr(options, name)
    return fields | options.extra_body


def _entry(
    task: Task, site: Site, load: Load, found: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """One point as a result has it: vLLM's keys, and the plain run inside."""
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
    for told in options.metadata or ():
        name, _, value = told.partition("=")
        entry[name] = value
    if PLAIN in found:
        entry[PLAIN] = found[PLAIN]
    return entry


def sweep_table(
    points: Sequence[tuple[Load, str, dict[str, Any]]], wanted: Wanted
) -> str:
    """All loads, one a line: throughput and the medians of the times."""
    times = [f"{metric.upper()} ms" for metric in wanted.metrics]
    rows = [["load", "mode", "tokens/s", *times]]
    for load, mode, found in points:
        middle = [f"{found[f'median_{metric}_ms']:.2f}" for metric in wanted.metrics]
        rows.append([_where(load), mode, f"{found['output_throughput']:.1f}", *middle])
    return table(rows)


def _where(load: Load) -> str:
    limit = "any" if load.max_concurrency is None else str(load.max_concurrency)
    return f"{load.request_rate:g} requests/s, concurrency {limit}"
