"""Comparison of methods on a fake device."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec.bench import methods, spec
from jaxspec.bench.method_report import method_table, verdict
from jaxspec.bench.methods import methods_of
from jaxspec.errors import ConfigError, UnsupportedError
from tests.bench.workloads import cell, flags, line_in, use_fake_engine
from tests.support.model_configs import TINY, write_config, write_model

SMALL = ("--output-len", 12, "--num-iters", 1, "--batch-sizes", 1)
GREEDY = ("--temperatures", 0)
ONE_LAYER: dict[str, Any] = dict(
    model_type="llama",
    num_hidden_layers=1,
    intermediate_size=64,
    num_attention_heads=4,
)
HEADS = {"medusa": dict(model_type="medusa", num_heads=2), "eagle": ONE_LAYER}


@pytest.fixture(name="folders")
def _folders(tmp_path):
    """Write heads, and draft models of both kinds."""
    found = {
        "plain": write_model(tmp_path / "plain"),
        "parallel": write_model(tmp_path / "parallel", pard_token=3),
    }
    sizes = {name: TINY[name] for name in ("hidden_size", "vocab_size")}
    for name, content in HEADS.items():
        found[name] = write_config(tmp_path / name, content | sizes)
    return found


def found_methods(*arguments: Any) -> dict[str, tuple[str, int]]:
    """Return the method and K of each comparison, by its name."""
    found = methods_of(flags("spec", *SMALL, *arguments))
    names = [one.name for one in found]
    assert len(set(names)) == len(names)
    return {
        one.name: (one.config["method"], one.config["num_speculative_tokens"])
        for one in found
    }


def test_all_methods_of_a_target_are_found(folders, tmp_path):
    names = ["ngram", "suffix", "draft_model"]
    names += ["ngram+draft_model", "suffix+draft_model"]
    own = {name: (name, 5) for name in names}
    heads = {
        "eagle3 tiny-gemma2-eagle3": ("eagle3", 5),
        "medusa tiny-gemma2-medusa": ("medusa", 4),
    }
    assert found_methods("--all-methods") == own | heads
    *_, head, _ = methods_of(flags("spec", *SMALL, "--all-methods"))
    assert head.config["model"] == "jaxspec/tiny-gemma2-eagle3", "a result has no path"
    assert found_methods("--all-methods", *folders.values()) == own | {
        "draft_model plain": ("draft_model", 5),
        "pard parallel": ("pard", 5),
        "medusa medusa": ("medusa", 2),
        "eagle eagle": ("eagle", 5),
    }
    alone = ("--model", folders["plain"], "--all-methods")
    assert list(found_methods(*alone)) == names[:2]
    few = found_methods(*alone, "--num-speculative-tokens", 2)
    assert few == {name: (name, 2) for name in names[:2]}
    config = json.dumps({"method": "medusa", "model": folders["medusa"]})
    found = found_methods(*alone, "--speculative-config", config)
    assert found["medusa medusa"] == ("medusa", 2)
    count = ("--num-speculative-tokens", 3, "--speculative-model", folders["plain"])
    found = found_methods(*alone, *count)
    assert found["suffix+draft_model"] == ("suffix+draft_model", 3)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match="model_type must be one of 'gemma2'"):
        found_methods("--all-methods", tmp_path)


def test_every_method_is_measured_with_its_own_drafts(monkeypatch, tmp_path, capsys):
    opened = use_fake_engine(monkeypatch)
    open_fake, configs = methods.open_offline, []

    def record(options: Any, **sizes: Any) -> Any:
        configs.append((options.speculative_config, options.speculative_model))
        return open_fake(options, **sizes)

    monkeypatch.setattr(methods, "open_offline", record)
    path = tmp_path / "out.json"
    spec.run(flags("spec", *SMALL, *GREEDY, "--output-json", path, "--all-methods"))
    printed = capsys.readouterr().out
    found = json.loads(line_in(path, printed))
    assert found["arguments"]["model"] == "jaxspec/tiny-gemma2"
    assert len(opened) == len(found["methods"]) == 7
    for one, config in zip(found["methods"], configs, strict=True):
        assert config == (one["speculative_config"], None)
        (point,) = one["points"]
        assert point["is_equal"] is True
        assert len(point["speculative"]["acceptance"]["acceptance_rate_per_position"])
        assert point["decode_speed_up"]["least"] > 0
        assert one["speculative_config"]["method"] == one["name"].split()[0]
        assert f"| {one['name']} | all | 0 | 1 |" in printed
    assert "\n".join(found["answer"]) in printed


@pytest.fixture(name="prompts")
def _prompts(tmp_path: Path) -> Path:
    """Write prompts of two categories, and one that is too long."""
    lines = [
        {"task": "qa", "prompt": "The"},
        {"task": "copying", "prompt": "One day"},
        {"task": "qa", "prompt": "word " * 400},
        {"task": "qa", "prompt": "Once"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def by_category(prompts: Path, output: Path, *more: Any) -> tuple[Any, ...]:
    given = ("--dataset-path", prompts, "--by-category", "task", "--max-model-len", 256)
    given += ("--all-methods", "--output-json", output, "--no-parts", *more)
    given += ("--num-iters-warmup", 0, "--num-prompts", 2)
    return ("spec", "--output-len", 12, "--num-iters", 1, *given)


@pytest.fixture(name="one_method")
def _one_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare only the last method, a head."""

    def last(options: Any) -> list[methods.Method]:
        return methods_of(options)[-1:]

    monkeypatch.setattr(methods, "methods_of", last)


@pytest.mark.usefixtures("one_method")
def test_categories_are_measured_apart_with_fixed_and_chosen_k(
    monkeypatch, prompts, tmp_path, capsys
):
    use_fake_engine(monkeypatch)
    path = tmp_path / "out.json"
    cells = ("--batch-sizes", 1, 2, "--temperatures", 0, 0.8, "--draft-tokens", 1)
    spec.run(flags(*by_category(prompts, path, *cells)))
    printed = capsys.readouterr().out
    found = json.loads(line_in(path, printed))
    for one in found["methods"]:
        places = [
            (point["temperature"], point["batch_size"], point["category"])
            for point in one["points"]
        ]
        expected = [
            (temperature, size, category)
            for temperature in (0, 0.8)
            for size in (1, 2)
            for category in ("qa", "copying")
        ]
        assert places == expected
        for point in one["points"]:
            assert point.get("is_equal") == (None if point["temperature"] else True)
            assert set(point["by_num_draft_tokens"]) == {"1"}
            # Two prompts: as two batches of one prompt, and as one of two.
            number = 2 // point["batch_size"]
            modes = [point["chosen"], *point["by_num_draft_tokens"].values()]
            for mode in (point["plain"], point["speculative"], *modes):
                assert len(mode["elapsed_s"]) == number
            per_round = [
                mode["acceptance"]["num_draft_tokens"]
                / mode["acceptance"]["num_drafts"]
                for mode in (point["by_num_draft_tokens"]["1"], point["speculative"])
            ]
            assert per_round[0] <= 1 < per_round[1]
    assert method_table(found["methods"]) in printed
    num_greedy = 4 * len(found["methods"])
    assert f"plain decoding in {num_greedy} of {num_greedy} cells" in printed


@pytest.mark.usefixtures("one_method")
def test_resumed_result_has_only_missing_cells_measured(
    monkeypatch, prompts, tmp_path, capsys
):
    opened = use_fake_engine(monkeypatch)
    path = tmp_path / "out.json"
    cells = ("--temperatures", 0, "--batch-sizes", 1, "--max-num-seqs", 2)
    spec.run(flags(*by_category(prompts, path, *cells, "--resume")))
    first = json.loads(path.read_text())
    num_opened = len(opened)
    spec.run(flags(*by_category(prompts, path, *cells, "--resume")))
    assert len(opened) == num_opened, "nothing was missing"
    first["methods"][0]["points"].pop()
    path.write_text(json.dumps(first))
    more = ("--temperatures", 0, "--batch-sizes", 1, 2, "--max-num-seqs", 2)
    spec.run(flags(*by_category(prompts, path, *more, "--resume")))
    found = json.loads(path.read_text())
    for before, after in zip(first["methods"], found["methods"], strict=True):
        assert after["points"][: len(before["points"])] == before["points"]
        assert len(after["points"]) == 4
    # Another file of prompts, another output length, another K, other weights.
    for changed, name in (
        (("--output-len", 10), "output_len"),
        (("--num-speculative-tokens", 2), "speculative_config"),
    ):
        with pytest.raises(ConfigError, match=f"measured with {name}|{name}="):
            spec.run(flags(*by_category(prompts, path, *more, "--resume", *changed)))
    entry = found["methods"][-1]
    digest, entry["weights_digest"] = entry["weights_digest"], "0"
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=f"weights_digest='0', got '{digest}'"):
        spec.run(flags(*by_category(prompts, path, *more, "--resume")))
    prompts.write_text(prompts.read_text().replace("Once", "Twice"))
    with pytest.raises(ConfigError, match="prompts_digest"):
        spec.run(flags(*by_category(prompts, path, *more, "--resume")))
    path.write_text("[]")
    with pytest.raises(ConfigError, match="--resume needs a result of spec"):
        spec.run(flags(*by_category(prompts, path, *more, "--resume")))


DFLASH = dict(
    architectures=["DFlashDraftModel"],
    model_type="qwen3",
    num_hidden_layers=2,
    intermediate_size=64,
    num_attention_heads=4,
    block_size=4,
    dflash_config=dict(target_layer_ids=[1], mask_token_id=3),
)
EAGLE3 = ONE_LAYER | dict(architectures=["LlamaForCausalLMEagle3"])


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (DFLASH | dict(num_target_layers=18), "num_target_layers=18, and .* 6 layers"),
        (DFLASH | dict(dflash_config=dict(target_layer_ids=[9])), "mask_token_id"),
        (EAGLE3 | dict(hidden_size=8), "target_hidden_size=8, and .* has 384"),
        (EAGLE3 | dict(speculators_version="1.0"), "'0.1' to '0.9', got '1.0'"),
        (
            DFLASH | dict(architectures=["Qwen3DSparkModel"]),
            "a head of kind 'dspark'.*: eagle, eagle3, medusa, dflash",
        ),
    ],
)
def test_head_of_another_target_is_refused_before_any_run(
    monkeypatch, tmp_path, content, named
):
    opened = use_fake_engine(monkeypatch)
    sizes = dict(hidden_size=384, vocab_size=8192)
    folder = write_config(tmp_path / "head", sizes | content)
    arguments = ("--load-format", "dummy", "--all-methods", folder)
    with pytest.raises((ConfigError, UnsupportedError), match=named):
        spec.run(flags("spec", *SMALL, *GREEDY, *arguments))
    assert not opened


@pytest.mark.usefixtures("one_method")
def test_stopped_run_keeps_its_measured_cells(monkeypatch, prompts, tmp_path):
    use_fake_engine(monkeypatch)
    path, measured = tmp_path / "out.json", methods._measured
    calls: list[str] = []

    def interrupt(*arguments: Any) -> Any:
        calls.append("")
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measured(*arguments)

    monkeypatch.setattr(methods, "_measured", interrupt)
    cells = (*GREEDY, "--batch-sizes", 1)
    with pytest.raises(KeyboardInterrupt):
        spec.run(flags(*by_category(prompts, path, *cells)))
    (entry,) = json.loads(path.read_text())["methods"]
    assert [point["category"] for point in entry["points"]] == ["qa"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("eagle3", "Give the folder with its weights"),
        ("draft_model", "with --speculative-model"),
        ("ngram", "is always measured"),
    ],
)
def test_names_of_methods_are_refused_in_place_of_folders(monkeypatch, name, hint):
    opened = use_fake_engine(monkeypatch)
    with pytest.raises(ConfigError, match=hint):
        spec.run(flags("spec", *SMALL, "--all-methods", name))
    assert not opened


def test_table_and_verdict_of_methods():
    ngram = {"name": "ngram", "num_levels": 2}
    suffix = {"name": "suffix", "num_levels": 4}
    ngram["points"] = [cell("qa", 1.5, 1.6), cell("copying", 2.0, 2.0, is_equal=False)]
    suffix["points"] = [cell("qa", 0.9, 0.8)]
    entries = [ngram, suffix]
    head, _, *rows = method_table(entries).splitlines()
    assert head.endswith("| K = 1 | K = 2 | K = 4 | K chosen | lowest to highest |")
    assert rows[:3] == [
        "| ngram | qa | 0 | 1 | 0.90 0.50 | 2.40 | 25.00 | 20.00 | 1.10 | 1.60 | - "
        "| 1.50 | 1.40 to 1.60 |",
        "| suffix | qa | 0 | 1 | 0.90 0.50 | 2.40 | 25.00 | 20.00 | 1.10 | - | 0.80 "
        "| 0.90 | 0.80 to 1.00 |",
        "| ngram | copying | 0 | 1 | 0.90 0.50 | 2.40 | 25.00 | 20.00 | 1.10 | 2.00 "
        "| - | 2.00 | 1.90 to 2.10 |",
    ]
    equal, plain, share = verdict(entries)
    assert "in 2 of 3 cells" in equal
    assert "at least 0.90 times" in plain and "(suffix, qa, temp" in plain
    assert "at least 0.94 times" in share and "(ngram, qa, temp" in share
