"""Read draft counts (vLLM's metrics) and compiles from a server's /metrics."""

from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from jaxspec.bench.acceptance import Acceptance

PREFIX = "vllm:spec_decode_"
_FIELDS = {
    f"{PREFIX}num_drafts_total": "num_drafts",
    f"{PREFIX}num_draft_tokens_total": "num_draft_tokens",
    f"{PREFIX}num_accepted_tokens_total": "num_accepted",
}
_PER_POSITION = f"{PREFIX}num_accepted_tokens_per_pos_total"
_COMPILES = "jaxspec:num_compiles_total"
_WARMING = "jaxspec:warming"
_FORCED = "jaxspec:synthetic_acceptance_info"


@dataclass(frozen=True, kw_only=True)
class Scrape:
    """A server's counts at one time, summed over its engines.

    Attributes:
        acceptance: None if the server reports no drafts.
        num_compiles: None for servers other than jaxspec's.
        num_warming: Programs still to be compiled; 0 if not reported.
        forced_acceptance: Acceptance probability of each draft if it is forced.
    """

    acceptance: Acceptance | None = None
    num_compiles: int | None = None
    num_warming: int = 0
    forced_acceptance: tuple[float, ...] | None = None


def read_scrape(text: str) -> Scrape:
    """Parse Prometheus' text format."""
    counts, accepted = dict.fromkeys(_FIELDS.values(), 0), dict[int, int]()
    has_drafts, num_compiles, forced, num_warming = False, None, None, 0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            value = int(sample.value) if sample.name.endswith("_total") else 0
            if sample.name in _FIELDS:
                counts[_FIELDS[sample.name]] += value
                has_drafts = True
            elif sample.name == _PER_POSITION:
                position = int(sample.labels["position"])
                accepted[position] = accepted.get(position, 0) + value
            elif sample.name == _COMPILES:
                num_compiles = (num_compiles or 0) + value
            elif sample.name == _WARMING:
                num_warming += int(sample.value)
            elif sample.name == _FORCED:
                forced = tuple(map(float, sample.labels["chances"].split(",")))
    width = max(accepted, default=-1) + 1
    per_position = tuple(accepted.get(position, 0) for position in range(width))
    fields: dict[str, Any] = {**counts, "per_position": per_position}
    acceptance = Acceptance(**fields)
    return Scrape(
        acceptance=acceptance if has_drafts else None,
        num_compiles=num_compiles,
        num_warming=num_warming,
        forced_acceptance=forced,
    )
