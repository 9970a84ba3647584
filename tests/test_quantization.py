"""What the documentation says of quantization is what was recorded, in its words."""

import json
from pathlib import Path

from benchmarks.quantization import FORMS, KV_KINDS, MODES, PATH

DOCS = Path(__file__).parents[1] / "docs" / "quantization.md"


def test_every_form_is_recorded_and_told():
    record = json.loads(PATH.read_text(encoding="utf-8"))
    text = DOCS.read_text(encoding="utf-8")
    keys = ("kind", "has_int8_embedding", "kv_cache_dtype")
    rows = record["quality"]
    assert [tuple(row[key] for key in keys) for row in rows] == list(FORMS)
    for row in rows:
        if row["has_int8_embedding"]:
            continue
        name = row["kind"] or "as they are"
        if row["kv_cache_dtype"] != "auto":
            name = f"keys and values {row['kv_cache_dtype']}"
        start = f"| {name} | {row['weight_bytes']:,} | "
        [line] = [one for one in text.splitlines() if one.startswith(start)]
        *_, perplexity, divergence, same = line.strip("| ").split(" | ")
        assert perplexity == f"{row['perplexity']:.2f}"
        assert round(float(divergence) - row["kl_nats_per_token"], 4) == 0
        assert (
            round(float(same.rstrip(" %")) - 100 * row["share_of_same_first"], 1) == 0
        )


def test_acceptance_under_every_type_of_keys_and_values_is_recorded_and_told():
    record = json.loads(PATH.read_text(encoding="utf-8"))
    lines = DOCS.read_text(encoding="utf-8").splitlines()
    rows = {(row["kv_cache_dtype"], row["mode"]): row for row in record["acceptance"]}
    assert list(rows) == [(kind, mode) for kind in KV_KINDS for mode in MODES]
    for kind in KV_KINDS:
        cells = [record["dtype"] if kind == "auto" else kind]
        for mode in MODES:
            row = rows[kind, mode]
            cells.append(f"{100 * row['acceptance_rate']:.1f} %")
            cells.append(f"{row['same_texts']} of {row['num_texts']}")
        assert f"| {' | '.join(cells)} |" in lines
