"""`lossless`: does speculation change the texts of a server?

Sends the same prompts to a server and to a reference: the same server with other
fields in its requests (for jaxspec's server: without drafts), or another server. Works
with every server that has OpenAI's completions. A difference is a near tie if the
reference's logprobs of the two tokens are nearly equal: then rounding, which depends on
the batch on most devices, may choose either.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm.auto import tqdm

from jaxspec.bench.client import HttpError, fetch, request, server_url
from jaxspec.bench.data import Prompt
from jaxspec.bench.flags import dataset
from jaxspec.bench.report import BenchError, check_writable, header, write_whole
from jaxspec.bench.scrape import read_scrape
from jaxspec.command_line import bearer
from jaxspec.errors import ConfigError, check_integer, check_number

COMPLETIONS = "/v1/completions"
WITHOUT_DRAFTS = {"num_speculative_tokens": 0}
GREEDY = {"temperature": 0.0}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "likes": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
GRAMMAR = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": SCHEMA},
    }
}
# Verdicts.
EQUAL, TIES, DIFFERENT = "equal", "near ties", "different"
NOT_OFFERED, FAILED = "not offered", "failed"


@dataclass(kw_only=True)
class Text:
    """One generated text.

    Attributes:
        tokens: Its tokens as texts; empty if the server returns no logprobs.
        logprobs: Log-probability of each token.
        top: Most likely tokens at each position, with their log-probabilities.
    """

    text: str
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server, and the fields that its requests have in addition."""

    url: str
    fields: Mapping[str, Any]
    headers: Mapping[str, str]

    async def generate(
        self, prompts: Sequence[Prompt], fields: Mapping[str, Any], at_once: int
    ) -> list[Text]:
        """Generate a text for each prompt, `at_once` at a time.

        Raises:
            HttpError: A request failed.
        """
        limit = asyncio.Semaphore(at_once)

        async def one(number: int, prompt: Prompt) -> Text:
            body = {"prompt": prompt.text, **self.fields, **fields}
            if "seed" in body:
                body["seed"] += number
            async with limit:
                return await self._ask(body)

        return await asyncio.gather(*map(one, range(len(prompts)), prompts))

    async def _ask(self, body: Mapping[str, Any]) -> Text:
        url = f"{self.url}{COMPLETIONS}"
        async with request(url, body=body, headers=self.headers) as response:
            content = (await response.aread()).decode(errors="replace")
        if response.status_code != 200:
            status = response.status_code
            raise HttpError(f"{url}: status {status}: {content[:300]}", status)
        try:
            return read_text(json.loads(content)["choices"][0])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            reason = f"not a completion of OpenAI's API: {content[:300]!r}"
            raise HttpError(f"{url}: {reason}") from error


def read_text(choice: Mapping[str, Any]) -> Text:
    """Read a choice, whose logprobs may have the form of completions or of chats."""
    found, logprobs = Text(text=choice["text"]), choice.get("logprobs") or {}
    if "content" in logprobs:  # llama.cpp writes those of chats
        for entry in logprobs["content"]:
            found.tokens.append(entry["token"])
            found.logprobs.append(entry["logprob"])
            top = entry.get("top_logprobs") or ()
            found.top.append({one["token"]: one["logprob"] for one in top})
        return found
    found.tokens = list(logprobs.get("tokens") or ())
    found.logprobs = list(logprobs.get("token_logprobs") or ())
    found.top = [dict(top or {}) for top in logprobs.get("top_logprobs") or ()]
    return found


def compare(reference: Text, other: Text) -> dict[str, Any] | None:
    """Return the first difference of two texts; None if they are equal.

    `gap` is how much less likely the other's token is than the reference's, in nats,
    by the reference; None if its logprobs lack the token.
    """
    if reference.text == other.text:
        return None
    pairs = list(zip(reference.tokens, other.tokens, strict=False))
    at = next((at for at, (one, two) in enumerate(pairs) if one != two), None)
    if at is None:  # no logprobs, or one text is the beginning of the other
        same = os.path.commonprefix([reference.text, other.text])
        return {"character": len(same), "gap": None}
    top = reference.top[at] if at < len(reference.top) else {}
    gap = None
    if pairs[at][1] in top:
        gap = abs(reference.logprobs[at] - top[pairs[at][1]])
    tokens = dict(zip(("reference_token", "token"), pairs[at], strict=True))
    return {"token_number": at, **tokens, "gap": gap}


def logprob_error(reference: Sequence[Text], others: Sequence[Text]) -> float | None:
    """Return the largest difference of logprobs before the first other token."""
    found = []
    for one, two in zip(reference, others, strict=True):
        for at, pair in enumerate(zip(one.tokens, two.tokens, strict=False)):
            if pair[0] != pair[1]:
                break
            found.append(abs(one.logprobs[at] - two.logprobs[at]))
    return max(found, default=None)


def verdict_of(
    reference: Sequence[Text], others: Sequence[Text], tie_gap: float
) -> dict[str, Any]:
    """Compare the texts of all prompts."""
    found = [compare(*pair) for pair in zip(reference, others, strict=True)]
    differences = [
        {"prompt": number, **one} for number, one in enumerate(found) if one is not None
    ]
    gaps = [one["gap"] for one in differences]
    verdict = EQUAL
    if differences:
        is_tied = all(gap is not None and gap <= tie_gap for gap in gaps)
        verdict = TIES if is_tied else DIFFERENT
    return {
        "verdict": verdict,
        "num_texts": len(found),
        "num_equal": len(found) - len(differences),
        "largest_logprob_difference": logprob_error(reference, others),
        "differences": differences,
    }


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the subcommand; return the result that `--json` prints.

    Raises:
        ConfigError: A flag is invalid; nothing was sent.
        BenchError: A server does not respond.
    """
    check_integer(ConfigError, "--num-prompts", options.num_prompts, low=1)
    check_integer(ConfigError, "--output-len", options.output_len, low=1)
    check_integer(ConfigError, "--max-concurrency", options.max_concurrency, low=2)
    check_number(ConfigError, "--tie-gap", options.tie_gap, low=0)
    check_writable(options.output_json, "--output-json")
    prompts = dataset(options).prompts(options.num_prompts)
    try:
        result = asyncio.run(_run(options, prompts))
    except HttpError as error:
        raise BenchError(str(error)) from error
    print(report(result))
    if options.output_json is not None:
        text = json.dumps(result, indent=2, allow_nan=False)
        write_whole(f"{text}\n", options.output_json)
    return [result]


async def _run(
    options: argparse.Namespace, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    headers = bearer(options.api_key)
    url = server_url(options.base_url)
    model, owner = await _model(url, headers)
    others = options.other_extra_body
    if options.other_base_url is None and others is None:
        if owner != "jaxspec":
            raise ConfigError(
                f"--other-base-url must be the URL of a server without speculation, or "
                f"--other-extra-body the fields that turn it off in a request: "
                f"{url} is not jaxspec's server, which knows num_speculative_tokens."
            )
        others = WITHOUT_DRAFTS
    other_url = server_url(options.other_base_url or url)
    other_model = model
    if other_url != url:
        other_model, _ = await _model(other_url, headers)
    common = {"max_tokens": options.output_len, "ignore_eos": options.ignore_eos}
    one = Server(
        url=url,
        fields={"model": options.model or model, **common, **options.extra_body},
        headers=headers,
    )
    reference = Server(
        url=other_url,
        fields={"model": options.model or other_model, **common, **(others or {})},
        headers=headers,
    )
    before = await _num_drafts(one)
    cases = await _cases(options, one, reference, prompts)
    after = await _num_drafts(one)
    num_drafts = None if before is None or after is None else after - before
    if num_drafts == 0:
        raise BenchError(
            "The server made no drafts, so nothing was checked. Start it with "
            'speculation; on jaxspec\'s server {"controller": "fixed"} makes it draft '
            "in every round."
        )
    checked = [case["verdict"] for case in cases if not case["is_control"]]
    return header("lossless", options) | {
        "url": url,
        "reference": {"url": other_url, "fields": others or {}},
        "tie_gap": options.tie_gap,
        "num_drafts": num_drafts,
        "cases": cases,
        "is_lossless": not {DIFFERENT, FAILED} & set(checked),
    }


async def _num_drafts(server: Server) -> int | None:
    """Return how often a server has drafted; None if its metrics lack it."""
    try:
        text = await fetch(f"{server.url}/metrics", server.headers)
        acceptance = read_scrape(text).acceptance
    except (HttpError, ValueError):
        return None
    return None if acceptance is None else acceptance.num_drafts


async def _model(url: str, headers: Mapping[str, str]) -> tuple[str, str]:
    """Return the name and the owner of a server's first model."""
    text = await fetch(f"{url}/v1/models", headers)
    try:
        model = json.loads(text)["data"][0]
        return model["id"], str(model.get("owned_by"))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise HttpError(f"/v1/models names no model: {text[:200]!r}") from error


async def _cases(
    options: argparse.Namespace,
    one: Server,
    reference: Server,
    prompts: Sequence[Prompt],
) -> list[dict[str, Any]]:
    """Generate and compare the texts of all cases."""
    count = options.max_concurrency
    greedy = await _with_logprobs(reference, prompts[:1])
    seeded = GREEDY | {"temperature": 0.8, "seed": 1}
    # Name, fields, requests at once, and whether the reference is compared with itself.
    plan: list[tuple[str, dict[str, Any], int, bool]] = [
        ("greedy, one at a time", greedy, 1, False),
        (f"greedy, {count} at once", greedy, count, False),
        ("greedy, prompts in the prefix cache", greedy, 1, False),
        (
            "greedy, JSON by a schema",
            GREEDY | GRAMMAR | {"ignore_eos": False},
            1,
            False,
        ),
        (f"the reference itself, {count} at once", greedy, count, True),
    ]
    if one.url == reference.url:  # other servers draw other random numbers
        plan.insert(4, ("seeded, one at a time", seeded, 1, False))
        plan.insert(5, (f"seeded, {count} at once", seeded, count, False))
    expected: dict[str, list[Text]] = {}
    cases = []
    for name, fields, at_once, is_control in tqdm(plan, unit="case", disable=None):
        case = {"case": name, "is_control": is_control}
        key = json.dumps(fields)
        try:
            if key not in expected:
                expected[key] = await reference.generate(prompts, fields, 1)
        except HttpError as error:
            if not _is_refusal(error) or fields is greedy:
                raise
            cases.append(case | {"verdict": NOT_OFFERED, "reason": str(error)})
            continue
        server = reference if is_control else one
        try:
            texts = await server.generate(prompts, fields, at_once)
        except HttpError as error:
            cases.append(case | {"verdict": FAILED, "reason": str(error)})
            continue
        cases.append(case | verdict_of(expected[key], texts, options.tie_gap))
    return cases


async def _with_logprobs(server: Server, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return the fields of greedy requests, with logprobs if the server has them."""
    fields = GREEDY | {"logprobs": 5}
    try:
        await server.generate(prompts, fields, 1)
    except HttpError as error:
        if not _is_refusal(error):
            raise
        return GREEDY
    return fields


def _is_refusal(error: HttpError) -> bool:
    """Return whether the server does not offer what a request asked for."""
    return error.status is not None and (error.status < 500 or error.status == 501)


def report(result: Mapping[str, Any]) -> str:
    """Return the verdicts as a table of Markdown, and a sentence."""
    rows = [["case", "equal texts", "first difference", "verdict"]]
    for case in result["cases"]:
        if "num_texts" not in case:
            rows.append([case["case"], "-", case["reason"][:60], case["verdict"]])
            continue
        first = "-"
        if case["differences"]:
            one = case["differences"][0]
            place = one.get("token_number", one.get("character"))
            unit = "token" if "token_number" in one else "character"
            gap = "unknown" if one["gap"] is None else f"{one['gap']:.3g}"
            first = f"prompt {one['prompt']}, {unit} {place}, gap {gap}"
        equal = f"{case['num_equal']} of {case['num_texts']}"
        rows.append([case["case"], equal, first, case["verdict"]])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---|--:|---|---|")
    drafts = "The server's metrics do not show whether it drafted."
    if result["num_drafts"] is not None:
        drafts = f"Rounds with drafts: {result['num_drafts']}."
    end = "LOSSLESS: no text differs by more than near ties."
    if not result["is_lossless"]:
        end = "NOT LOSSLESS: see the cases that are different or failed."
    return "\n".join([*lines, "", drafts, end])
