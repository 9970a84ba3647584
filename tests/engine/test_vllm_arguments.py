"""vLLM's arguments that jaxspec does not have are accepted or named in an error.

Run as a script, this writes the tables of docs/vllm.md.
"""

import dataclasses
import json
import logging
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config.speculation import SpeculativeConfig
from jaxspec.engine.arg_utils import AsyncEngineArgs, EngineArgs
from jaxspec.engine.speculative_args import merge_speculative_arguments
from jaxspec.engine.vllm_arguments import (
    SHORT_FLAGS,
    VLLM_ENGINE_ARGUMENTS,
    VLLM_ENGINE_FLAGS,
    VLLM_SERVER_FLAGS,
    VLLM_SPECULATIVE_KEYS,
    VllmArgument,
)
from jaxspec.errors import ConfigError, UnsupportedError
from jaxspec.serve.flags import Options, make_parser, read_flags
from jaxspec.serve.settings import ServerSettings
from tests.support.model_configs import write_model

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "vllm.md"
RECORD = ROOT / "benchmarks" / "results" / "vllm-tests.json"
OWN_TESTS = """\
## vLLM's own tests and examples

The tests of vLLM {version}'s server and of its `LLM`, and its offline examples, run
without edits on the bundled pair, whatever model they name (measured {date} at commit
{commit}; benchmarks/results/vllm-tests.json has the counts of each file):

    pip install pytest-asyncio pytest-timeout anthropic regex pybase64
    python -m benchmarks.vllm_tests SOURCE --output record.json

SOURCE is the unpacked source distribution of vLLM. Instead of its package, tests import
one whose modules have jaxspec's names; a part that jaxspec does not have fails where a
test uses it. Flags of other models (`--reasoning-parser`, `--tool-call-parser`, LoRA)
are left out.

| | all | passed | failed | not applicable |
|---|---:|---:|---:|---:|"""
TABLES = {
    "Engine arguments": VLLM_ENGINE_ARGUMENTS,
    "Flags of the server": VLLM_SERVER_FLAGS,
    "Keys of `speculative_config`": VLLM_SPECULATIVE_KEYS,
}
OTHERS: dict[type, Any] = {
    int: 77,
    float: 0.77,
    str: "other",
    list: ["other"],
    dict: {"other": 1},
}


def page() -> str:
    """Return the text of docs/vllm.md: its introduction, and tables for the rest."""
    introduction, _, _ = PAGE.read_text(encoding="utf-8").partition("## ")
    parts = [introduction.removesuffix("\n")]
    for title, arguments in TABLES.items():
        for is_refused, outcome in ((False, "without effect"), (True, "refused")):
            lines = defaultdict(list)
            for argument in arguments.values():
                if argument.is_refused == is_refused:
                    default = argument.default
                    shown = "" if default in (None, "") else f" ({default})"
                    lines[argument.reason].append(f"`{argument.name}`{shown}")
            reason = "jaxspec does not have" if is_refused else "Why"
            rows = [f"| {', '.join(names)} | {why} |" for why, names in lines.items()]
            head = [f"| Argument | {reason} |", "|---|---|"]
            parts.append("\n".join([f"## {title}: {outcome}", "", *head, *rows, ""]))
    parts.append(own_tests())
    return "\n".join(parts)


def own_tests() -> str:
    """Return the section on vLLM's own tests and examples, from their record."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    rows = []
    for kind in ("tests", "examples"):
        counts = record[kind]
        numbers = [counts[key] for key in ("all", "passed", "failed", "not_applicable")]
        rows.append(f"| {kind} | {' | '.join(map(str, numbers))} |")
    reasons: Counter[str] = Counter()
    failed = []
    for name, found in record["files"].items():
        for reason, count in found["not_applicable"].items():
            reasons[re.sub("(vLLM's internal).*", r"\1s", reason)] += count
        tests = dict.fromkeys(test.partition("[")[0] for test in found["failed"])
        if tests:
            failed.append(f"- `{name}`: {', '.join(f'`{test}`' for test in tests)}")
    about = {name: record[name] for name in ("date", "commit")}
    parts = [OWN_TESTS.format(version=record["vllm"], **about), *rows, ""]
    if failed:
        parts += ["These fail:", "", *failed, ""]
    parts += ["Most common reasons why tests do not apply:", ""]
    parts += ["| Tests | Reason |", "|---:|---|"]
    parts += [f"| {count} | {why} |" for why, count in reasons.most_common(12)]
    return "\n".join([*parts, ""])


def test_page_lists_the_tables():
    assert PAGE.read_text(encoding="utf-8") == page(), "see the page's first line"


def other_value(argument: VllmArgument) -> Any:
    """Return a value that is not the default."""
    others = (True, False) if argument.kind is bool else (OTHERS[argument.kind],)
    return next(one for one in others if not argument.is_default(one))


def values_without_effect(arguments: Mapping[str, VllmArgument]) -> dict[str, Any]:
    return {
        name: other_value(argument)
        for name, argument in arguments.items()
        if not argument.is_refused
    }


def refused(arguments: Mapping[str, VllmArgument]) -> list[VllmArgument]:
    return [argument for argument in arguments.values() if argument.is_refused]


def read(*arguments: str) -> Options:
    return read_flags("prog", arguments)


def test_each_argument_is_in_one_table():
    fields = {item.name for item in dataclasses.fields(AsyncEngineArgs)}
    assert fields >= VLLM_ENGINE_ARGUMENTS.keys()
    settings = {item.name for item in dataclasses.fields(ServerSettings)}
    assert not settings & (VLLM_SERVER_FLAGS.keys() | VLLM_ENGINE_FLAGS.keys())
    assert not VLLM_SERVER_FLAGS.keys() & fields
    keys = {item.name for item in dataclasses.fields(SpeculativeConfig)}
    assert not VLLM_SPECULATIVE_KEYS.keys() & keys


def test_engine_accepts_arguments_without_effect_and_logs_them_once(tmp_path, caplog):
    model = str(tmp_path / "model")
    write_model(Path(model))
    defaults = {name: one.default for name, one in VLLM_ENGINE_ARGUMENTS.items()}
    alone = EngineArgs(model=model)
    assert EngineArgs(model=model, **defaults) == alone
    empty = dict(limit_mm_per_prompt={}, hf_overrides={}, logits_processors=[])
    expected = EngineArgs(model=model, **empty).create_engine_config()
    assert not caplog.records, "defaults are silent"
    given = values_without_effect(VLLM_ENGINE_ARGUMENTS)
    config = EngineArgs(model=model, **given).create_engine_config()
    assert config == expected
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for name in given:
        assert f"{name}=" in record.getMessage()


@pytest.mark.parametrize(
    "argument", refused(VLLM_ENGINE_ARGUMENTS), ids=lambda x: x.name
)
def test_engine_names_the_feature_that_it_does_not_have(argument: VllmArgument):
    value = other_value(argument)
    with pytest.raises(UnsupportedError) as caught:
        EngineArgs(model="m", **{argument.name: value})
    assert (caught.value.parameter, caught.value.value) == (argument.name, value)
    assert f"{argument.name} must be {argument.default!r}" in str(caught.value)
    assert str(caught.value).endswith(f"jaxspec does not have {argument.reason}.")


def test_keys_of_speculative_config(caplog: pytest.LogCaptureFixture):
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    expected = merge_speculative_arguments({"speculative_config": drafts})
    defaults = {name: one.default for name, one in VLLM_SPECULATIVE_KEYS.items()}
    given = drafts | defaults | {"tensor_parallel_size": None}
    assert merge_speculative_arguments({"speculative_config": given}) == expected
    assert not caplog.records, "defaults are silent"
    given = drafts | values_without_effect(VLLM_SPECULATIVE_KEYS)
    assert merge_speculative_arguments({"speculative_config": given}) == expected
    assert "speculative_config['enforce_eager']=True" in caplog.text
    for argument in refused(VLLM_SPECULATIVE_KEYS):
        given = drafts | {argument.name: other_value(argument)}
        with pytest.raises(UnsupportedError) as caught:
            merge_speculative_arguments({"speculative_config": given})
        assert f"speculative_config[{argument.name!r}] must be" in str(caught.value)
        assert argument.reason in str(caught.value)


def test_flags(caplog: pytest.LogCaptureFixture):
    line = "m --enable-sleep-mode --limit-mm-per-prompt '{\"image\": 1}' -O3"
    line += " --cudagraph-capture-sizes 1 2 --no-enable-log-deltas --no-enable-lora"
    line += " --mm-processor-cache-gb 0.5 --max-num-scheduled-tokens 2k"
    engine: Any = read(*shlex.split(line)).engine
    assert (engine.enable_sleep_mode, engine.optimization_level) == (True, 3)
    assert engine.limit_mm_per_prompt == {"image": 1}
    assert engine.cudagraph_capture_sizes == ["1", "2"]
    assert (engine.mm_processor_cache_gb, engine.max_num_scheduled_tokens) == (
        0.5,
        2000,
    )
    assert "enable_log_deltas=False (jaxspec has its own logs)" in caplog.text
    with pytest.raises(UnsupportedError, match="reasoning models"):
        read("m", "--reasoning-parser", "qwen3")
    with pytest.raises(UnsupportedError, match="lora_modules must be None.*have LoRA"):
        read("m", "--lora-modules", "name=path", "other=path")


def test_flags_of_the_server_are_not_arguments_of_the_engine():
    options = read("m", "--max-num-queued-reqs", "7")
    assert options.settings.max_num_queued_reqs == 7
    assert options.engine == read("m").engine
    with pytest.raises(UnsupportedError, match="a flag of the server"):
        EngineArgs(model="m", max_num_queued_reqs=7)


def test_short_flags():
    actions = make_parser("prog")._option_string_actions
    for name, flags in SHORT_FLAGS.items():
        for flag in flags:
            assert actions[flag] is actions[f"--{name.replace('_', '-')}"], flag
    engine = read("m", "-q", "int8", "-n", "2", "-r", "1", "-pp", "1").engine
    assert (engine.quantization, engine.nnodes, engine.node_rank) == ("int8", 2, 1)
    with pytest.raises(
        UnsupportedError, match="pipeline_parallel_size must be 1, got 2"
    ):
        read("m", "-pp", "2")


def test_dotted_flags_set_keys():
    line = "m --speculative-config.method ngram -cc.level 3"
    line += " --speculative_config.num_speculative_tokens=4"
    engine: Any = read(*line.split()).engine
    expected = {"method": "ngram", "num_speculative_tokens": 4}
    assert engine.speculative_config == expected
    assert engine.compilation_config == {"level": 3}
    assert read("m", "-sc.method", "ngram").engine.speculative_model is None


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("enable_sleep_mod", "did you mean enable_sleep_mode?"),
        ("tensor_paralel_size", "did you mean tensor_parallel_size?"),
        ("enable_thinking", "see EngineArgs."),
        ("num_beams", "see EngineArgs."),
    ],
)
def test_suggests_only_near_names(name: str, hint: str):
    with pytest.raises(ConfigError) as caught:
        EngineArgs(model="m", **{name: 1})
    assert str(caught.value).startswith(f"{name} (given 1) is not an engine argument")
    assert str(caught.value).endswith(hint)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
