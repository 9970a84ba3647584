"""Every way to propose drafts over a fake device: which there are, and what is told."""

import json
from typing import Any

import pytest

from jaxspec.bench import methods, spec
from jaxspec.bench.acceptance import Acceptance
from jaxspec.bench.forms import Cell
from jaxspec.bench.methods import answer, method_table, methods_of
from jaxspec.errors import ConfigError
from tests.bench.workloads import flags, line_in, use_fake_engine
from tests.support.model_configs import TINY, write_model

SMALL = ("--output-len", 12, "--num-iters", 2, "--batch-sizes", 1, "--temperatures", 0)
HEADS: dict[str, dict[str, Any]] = {
    "medusa": dict(
        model_type="medusa",
        hidden_size=TINY["hidden_size"],
        vocab_size=TINY["vocab_size"],
        num_heads=2,
    ),
    "eagle": dict(
        model_type="llama",
        num_hidden_layers=1,
        hidden_size=TINY["hidden_size"],
        intermediate_size=64,
        num_attention_heads=4,
        vocab_size=TINY["vocab_size"],
    ),
}


@pytest.fixture(name="folders")
def _folders(tmp_path):
    """Heads, and draft models of both kinds."""
    found = {
        "plain": write_model(tmp_path / "plain"),
        "parallel": write_model(tmp_path / "parallel", pard_token=3),
    }
    for name, content in HEADS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
        found[name] = str(tmp_path / name)
    return found


def told(*arguments: Any) -> dict[str, tuple[str, int]]:
    """Names, with method and K."""
    found = methods_of(flags("spec", *SMALL, *arguments))
    names = [one.name for one in found]
    assert len(set(names)) == len(names)
    return {
        one.name: (one.config["method"], one.config["num_speculative_tokens"])
        for one in found
    }


def test_all_that_there_is_for_a_target_is_found(folders):
    """Of the bundled pair the draft model is known; what is looked up needs nothing."""
    own = ["ngram", "suffix", "draft_model", "ngram+draft_model", "suffix+draft_model"]
    heads = {
        "eagle3 tiny-gemma2-eagle3": ("eagle3", 5),
        "medusa tiny-gemma2-medusa": ("medusa", 4),
    }
    assert told("--all-methods") == {name: (name, 5) for name in own} | heads
    *_, head, _ = methods_of(flags("spec", *SMALL, "--all-methods"))
    assert head.config["model"] == "jaxspec/tiny-gemma2-eagle3", "no path in a result"
    assert told("--all-methods", *folders.values()) == {
        name: (name, 5) for name in own
    } | {
        "draft_model plain": ("draft_model", 5),
        "pard parallel": ("pard", 5),
        "medusa medusa": ("medusa", 2),
        "eagle eagle": ("eagle", 5),
    }
    alone = ("--model", folders["plain"], "--all-methods")
    assert list(told(*alone)) == own[:2]
    config = json.dumps({"method": "medusa", "model": folders["medusa"]})
    assert told(*alone, "--speculative-config", config)["medusa medusa"] == (
        "medusa",
        2,
    )
    count = ("--num-speculative-tokens", 3, "--speculative-model", folders["plain"])
    assert told(*alone, *count)["suffix+draft_model"] == ("suffix+draft_model", 3)


def test_what_is_neither_head_nor_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match="model_type must be one of 'gemma2'"):
        told("--all-methods", tmp_path)
    with pytest.raises(ConfigError, match="nosuch"):
        told("--all-methods", tmp_path / "nosuch")


def test_every_method_is_measured_on_the_same_prompts(monkeypatch, tmp_path, capsys):
    opened = use_fake_engine(monkeypatch)
    path = tmp_path / "out.json"
    spec.run(flags("spec", *SMALL, "--output-json", path, "--all-methods"))
    printed = capsys.readouterr().out
    found = json.loads(line_in(path, printed))
    assert found["arguments"]["model"] == "jaxspec/tiny-gemma2"
    names = [one["name"] for one in found["methods"]]
    assert len(opened) == len(names) == 7
    for one in found["methods"]:
        (point,) = one["points"]
        assert point["is_equal"] is True
        assert len(point["speculative"]["acceptance"]["acceptance_rate_per_position"])
        assert point["decode_speed_up"]["least"] > 0
        assert one["speculative_config"]["method"] == one["name"].split()[0]
        assert f"0, 1, {one['name']}" in printed
    assert "\n".join(found["answer"]) in printed


def test_each_engine_has_the_drafts_of_its_method(monkeypatch):
    configs = []

    def note(options: Any, **sizes: Any) -> Any:
        configs.append((options.speculative_config, options.speculative_model))
        raise KeyboardInterrupt

    monkeypatch.setattr(methods, "open_offline", note)
    with pytest.raises(KeyboardInterrupt):
        spec.run(flags("spec", *SMALL, "--all-methods"))
    assert configs == [({"method": "ngram", "num_speculative_tokens": 5}, None)]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--forms", "chain"), "--forms"),
        (("--draft-tokens", 2), "--draft-tokens"),
        (("--plot", "x.svg"), "--plot"),
    ],
)
def test_what_cannot_be_compared(arguments, field):
    with pytest.raises(ConfigError) as caught:
        spec.run(flags("spec", *SMALL, *arguments, "--all-methods"))
    assert caught.value.parameter == field


def cell(name: str, speed_up: float, **changes: Any) -> Cell:
    values: dict[str, Any] = dict(
        form=name,
        temperature=0.0,
        batch_size=1,
        num_levels=2,
        num_nodes=2,
        tokens_per_round=2.2,
        round_s=0.004,
        plain_round_s=0.003,
        speed_up=speed_up,
        least=speed_up - 0.1,
        acceptance=Acceptance(num_drafts=10, num_accepted=12, per_position=(8, 4)),
    )
    return Cell(**(values | changes))


def test_the_table_and_the_answer():
    cells = [
        cell("ngram", 1.1),
        cell("medusa", 1.5),
        cell("ngram", 0.9, temperature=0.8, round_s=None, acceptance=Acceptance()),
    ]
    rows = [(cells[0], 0), (cells[1], 3 * 2**19), (cells[2], None)]
    assert method_table(rows).splitlines()[1:] == [
        "temperature, batch, method  K  acceptance by position  tokens/round  round, ms"
        "  plain, ms  speed-up  least  MiB",
        "0, 1, ngram                 2               0.80 0.40          2.20       4.00"
        "       3.00      1.10   1.00  0.0",
        "0, 1, medusa                2               0.80 0.40          2.20       4.00"
        "       3.00      1.50   1.40  1.5",
        "0.8, 1, ngram               2                       -          2.20          -"
        "       3.00      0.90   0.80    -",
    ]
    assert answer(cells) == [
        "Temperature 0, batch 1: medusa, 1.50 times as fast as plain decoding.",
        "Temperature 0.8, batch 1: no drafts; ngram would be 0.90 times as fast.",
    ]
