"""Figures and tables of docs/quantization.md match the recorded results."""

import json
from pathlib import Path

from benchmarks import quantization, quantized_products

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8")
RECORD = json.loads(quantization.PATH.read_text(encoding="utf-8"))
DRAFTS = ROOT / "docs" / "drafts.md"


def test_every_form_is_recorded_and_documented():
    keys = ("kind", "has_int8_embedding", "kv_cache_dtype")
    rows = RECORD["quality"]
    assert [tuple(row[key] for key in keys) for row in rows] == list(quantization.FORMS)
    for row in rows:
        if row["has_int8_embedding"]:
            continue
        name = row["kind"] or "as they are"
        if row["kv_cache_dtype"] != "auto":
            name = f"keys and values {row['kv_cache_dtype']}"
        start = f"| {name} | {row['weight_bytes']:,} | "
        [line] = [one for one in TEXT.splitlines() if one.startswith(start)]
        *_, perplexity, divergence, same = line.strip("| ").split(" | ")
        assert perplexity == f"{row['perplexity']:.2f}"
        assert round(float(divergence) - row["kl_nats_per_token"], 4) == 0
        assert (
            round(float(same.rstrip(" %")) - 100 * row["share_of_same_first"], 1) == 0
        )


def test_acceptance_with_every_kv_type_is_documented():
    lines = TEXT.splitlines()
    rows = {(row["kv_cache_dtype"], row["mode"]): row for row in RECORD["acceptance"]}
    assert list(rows) == [
        (kind, mode) for kind in quantization.KV_KINDS for mode in quantization.MODES
    ]
    # The record's top-level type is that of the part measured last, so read this
    # part's.
    dtype = RECORD["measured"]["acceptance"]["dtype"]
    for kind in quantization.KV_KINDS:
        cells = [dtype if kind == "auto" else kind]
        for mode in quantization.MODES:
            row = rows[kind, mode]
            cells.append(f"{100 * row['acceptance_rate']:.1f} %")
            cells.append(f"{row['same_texts']} of {row['num_texts']}")
        assert f"| {' | '.join(cells)} |" in lines


def test_speeds_match_the_measurements():
    lines = quantization.speed_lines(RECORD)
    assert len(lines) == 2 + len(quantization.PAIRS)
    assert "\n".join(lines) in TEXT


def test_ceilings_follow_from_bytes():
    assert "\n".join(quantization.ceiling_lines()) in TEXT
    # The model has 2.6 billion parameters, of which 0.59 billion compute logits.
    assert round(quantization.pass_bytes("2b", None) / 2e9, 2) == 2.61
    head = quantization.pass_bytes("2b", None) - quantization.pass_bytes("2b", None, 1)
    assert round(head / 2e9, 2) == 0.59
    # There is one float32 scale per output, or in int4 per 128 features.
    assert (
        0.5
        < quantization.pass_bytes("2b", "int8") / quantization.pass_bytes("2b", None)
        < 0.501
    )
    layers = quantization.pass_bytes("2b", "int4", 1) / quantization.pass_bytes(
        "2b", None, 1
    )
    assert round(layers, 3) == round((4 + 32 / 128) / 16, 3)


def test_acceptance_of_trimmed_heads_matches_the_record():
    """The figures are on another page, and in a table that `--tables` prints."""
    assert "\n".join(quantization.trimmed_lines(RECORD)) in DRAFTS.read_text(
        encoding="utf-8"
    )
    rows = RECORD["trimmed"]
    own = [row["draft_vocab_size"] for row in rows if not row["has_other_map"]]
    assert tuple(dict.fromkeys(own)) == quantization.HEADS
    for row in rows:
        assert row["mode"] in quantization.HEAD_MODES
        # Tokens that the draft model cannot propose do not change a text.
        assert row["same_texts"] == row["num_texts"], row
        rate = row["num_accepted"] / row["num_draft_tokens"]
        assert rate == row["acceptance_rate"]


def test_recorded_table_is_documented():
    text = quantized_products.PATH.read_text(encoding="utf-8")
    lines = quantized_products.table_lines(json.loads(text))
    assert len(lines) == len(quantized_products.FORMS) + 3
    assert "\n".join(lines) in TEXT
