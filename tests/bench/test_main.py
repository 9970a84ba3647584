"""The command line: vLLM's names, invalid values, JSON, failures."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxspec.bench import __main__ as command_line
from jaxspec.bench import offline
from jaxspec.bench.flags import MODULES, dataset, make_parser
from jaxspec.bench.offline import open_offline, sampling
from jaxspec.config.engine import EngineConfig
from jaxspec.engine.arg_utils import engine_args
from jaxspec.engine.model_folders import BUNDLED_TARGET
from jaxspec.sampling_params import RequestOutputKind
from tests.bench.workloads import flags, use_fake_engine
from tests.support.fake_engines import make_fake_engine
from tests.support.processes import run_python

FORCED = (
    '{"model":"jaxspec/tiny-gemma2-draft","num_speculative_tokens":2,'
    '"rejection_sample_method":"synthetic","synthetic_acceptance_length":2}'
)


def test_help_lists_the_subcommands_without_importing_jax():
    code = (
        "import sys, jaxspec.bench.__main__ as command_line\n"
        "assert command_line.main([]) == 0\n"
        # A client that only talks to a server needs no jax either.
        "import jaxspec.bench.serve\n"
        "assert not {'jax', 'matplotlib'} & sys.modules.keys()\n"
    )
    done = run_python("-c", code, check=True)
    commands = done.stdout.partition("subcommands:")[2]
    found = re.findall(r"^    (\w+)", commands, re.MULTILINE)
    expected = ["latency", "throughput", "serve", "lossless", "spec"]
    assert found == expected == list(MODULES)


# Command lines whose error is "FLAG must be ...", for their first flag.
OUT_OF_RANGE = (
    *("latency --num-iters 0", "latency --num-iters-warmup -1"),
    *("latency --output-len 0", "spec --batch-sizes 0", "spec --output-len 1"),
    *("serve --num-prompts 0", "serve --output-len 0", "serve --num-warmups -1"),
    *("serve --max-concurrency 0", "serve --burstiness 0"),
)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *((line, f"{line.split()[1]} must be") for line in OUT_OF_RANGE),
        ("latency --batch-size 0", "--batch-size must be an integer of at"),
        ("latency --output-len 9000", "--output-len 9000 are more than"),
        ("latency --top-p 2", "top_p must be"),
        ("latency --model /none", "model must be"),
        ("latency --max-num-seqs 4", "--max-num-seqs must be at least 8"),
        ("latency --output-json none/x", "--output-json must be a file"),
        ("latency --data-parallel-size 2", "Use `bench serve` with a server"),
        ("latency --forced-acceptance 1.5", "--forced-acceptance must be a"),
        (
            f"latency --forced-acceptance 0.5 --model {BUNDLED_TARGET}",
            "--forced-acceptance needs drafts",
        ),
        (
            f"latency --model {BUNDLED_TARGET} --forced-acceptance 0.5 "
            f"--speculative-config {FORCED}",
            "forced twice",
        ),
        ("throughput --num_prompts=0", "--num-prompts must be"),
        ("throughput --temperature 9", "temperature must be a number in"),
        ("spec --temperatures -1", "--temperatures must be a number in"),
        *(
            (f"spec --forms {form}", "--forms must be chain")
            for form in ("bush", "leaves=0", "leaves=x", "dynamic=16")
        ),
        ("spec --forms [(0,),(1,0)]", "speculative_token_tree must be"),
        ("spec --forms chain --draft-tokens 2", "--draft-tokens must be left out"),
        ("spec --forms chain --num-prompts -1", "--num-prompts must be"),
        ("spec --all-methods --forms chain", "--forms must be left out with"),
        ("spec --all-methods --draft-tokens 6", "--draft-tokens must be from 1 to 5"),
        ("spec --all-methods --resume", "--output-json must be given with --resume"),
        ("spec --all-methods --num-prompts 0", "--num-prompts must be"),
        (
            "spec --all-methods --by-category --dataset-name random",
            "--dataset-name must be bundled or custom with --by-category",
        ),
        ("spec --all-methods --by-category topic", 'prompt 1 has no "topic"'),
        ("spec --by-category", "--by-category must be left out without --all-methods"),
        ("spec --forms chain --resume", "--resume must be left out with --forms"),
        ("spec --all-methods /nosuch", "nosuch"),
        *(
            (f"serve --base-url {url}", "--base-url must be a URL")
            for url in ("x", "ftp://h", "http://", "http://h:port")
        ),
        ("serve --endpoint /v1/embeddings", "--endpoint must be a path"),
        ("serve --endpoint v1/completions", "--endpoint must be a path"),
        ("serve --request-rate 0", "--request-rate must be above 0"),
        ("serve --request-rate nan", "--request-rate must be above 0"),
        ("serve --percentile-metrics ttft,x", "--percentile-metrics must be some of"),
        ("serve --metric-percentiles 50,x", "--metric-percentiles must be numbers"),
        ("serve --metric-percentiles 101", "--metric-percentiles must be a number in"),
        ("serve --goodput itl:3", "--goodput must be NAME:MILLISECONDS"),
        ("serve --goodput ttft", "--goodput must be NAME:MILLISECONDS"),
        ("serve --save-result --result-dir none", "--result-dir must be a file in a"),
        ("serve --dataset-path none.jsonl", "--dataset-path must be a file"),
    ],
)
def test_invalid_value_is_one_line_and_code_2(line, message, capsys):
    arguments = line.split()
    assert command_line.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (error,) = shown.err.splitlines()
    assert error.startswith(f"python -m jaxspec.bench {arguments[0]}: error: ")
    assert message in error


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("serve --extra-body {", "must be JSON"),
        ("serve --extra-body []", "must be a JSON object"),
        ("latency --dataset-name sharegpt", "--dataset-name"),
        ("latency --request-rate 1", "--request-rate"),
        ("serve --max-num-seqs 1", "--max-num-seqs"),
        ("nothing", "nothing"),
        ("latency --plot a.svg", "--plot was removed: save the result"),
        ("serve --append-result", "--append-result was removed: name several loads"),
        ("serve --metadata a=b", "--metadata was removed: the result has all"),
    ],
)
def test_unknown_or_removed_flag_ends_the_program(line, message, capsys):
    with pytest.raises(SystemExit) as end:
        command_line.main(line.split())
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_stdout_has_only_json(monkeypatch, capsys):
    use_fake_engine(monkeypatch)
    sizes = ["--batch-size", "1", "--output-len", "4", "--num-iters", "1"]
    assert command_line.main(["latency", *sizes, "--no-parts", "--json"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found["speculative"]["num_output_tokens"] == 4
    assert found["parts"] == []
    assert "json" not in found["arguments"]
    assert "Avg latency: " in shown.err


def test_reads_vllms_command_lines():
    line = "latency --input-len 16 --output-len 8 --batch-size 4 --num-iters 5 "
    line += "--num-iters-warmup 2 --disable-detokenize"
    options = flags(*line.split())
    assert (options.input_len, options.output_len, options.batch_size) == (16, 8, 4)
    assert (options.num_iters, options.num_iters_warmup) == (5, 2)
    assert options.disable_detokenize
    line = "serve --dataset-name random --random-input-len 9 --random-output-len 7 "
    line += "--num-prompts 3 --request-rate inf --max-concurrency 2 --extra-body"
    options = flags(*line.split(), '{"a":1}')
    assert (options.input_len, options.output_len) == (9, 7)
    assert options.request_rate == [float("inf")]
    assert options.max_concurrency == [2]
    assert options.extra_body == {"a": 1}
    # A file of prompts needs no name of a dataset.
    assert dataset(flags("latency")).name == "bundled"
    given = flags("latency", "--dataset-path", "x.jsonl")
    assert dataset(given).path == Path("x.jsonl")
    found = dataset(flags("serve", "--dataset-name", "prefix_repetition", "--seed", 5))
    assert (found.name, found.prefix_len, found.seed) == ("prefix_repetition", 256, 5)
    assert make_parser("prog").parse_args([]).command is None


@pytest.mark.parametrize("name", ["latency", "throughput", "spec"])
def test_offline_commands_take_every_flag_of_the_engine(name):
    assert engine_args(vars(flags(name))).model == BUNDLED_TARGET
    options = flags(name, "--model", "m", "--max-num-seqs", "3", "--block-size", "32")
    engine = engine_args(vars(options))
    assert (engine.model, engine.max_num_seqs, engine.block_size) == ("m", 3, 32)
    assert engine.speculative_model is None


def test_engine_and_prompts_are_those_of_the_flags(monkeypatch):
    given: list[Any] = []

    def load(config: EngineConfig, *, tokenizer: Any) -> Any:
        given.append((config, tokenizer))
        return make_fake_engine()[0]

    monkeypatch.setattr(offline, "LLMEngine", load)
    prompts = open_offline(flags("latency"), num_prompts=10, num_seqs=10).prompts
    ((config, tokenizer),) = given
    assert (config.max_num_seqs, config.max_draft_tokens, len(prompts)) == (10, 5, 10)
    # Conversations are formatted as chat turns, and all prompts begin with bos.
    assert tokenizer.decode(prompts[0], skip_special_tokens=False).startswith(
        "<bos><start_of_turn>user\nA farmer"
    )
    assert {tokens[0] for tokens in prompts} == {tokenizer.bos_token_id}
    options = flags("latency", "--forced-acceptance", 0.8)
    open_offline(options, num_prompts=1, num_seqs=1)
    assert given[-1][0].speculative.forced_acceptance == pytest.approx((0.8,) * 5)
    options = flags("latency", "--dataset-name", "random", "--input-len", 40)
    made = open_offline(options, num_prompts=3, num_seqs=None)
    assert [len(tokens) for tokens in made.prompts] == [40] * 3


def test_sampling_follows_the_flags():
    options = flags("latency", "--temperature", 0.5, "--top-k", 4, "--output-len", 9)
    params = sampling(options, 2)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 4, 9)
    assert params.ignore_eos and params.detokenize
    assert params.output_kind is RequestOutputKind.DELTA
    assert params.extra_args == {"num_speculative_tokens": 2}
    changed = sampling(options, 0, is_streamed=False, temperature=0.0)
    assert changed.temperature == 0
    assert changed.output_kind is RequestOutputKind.FINAL_ONLY
    quiet = flags("latency", "--disable-detokenize", "--no-ignore-eos")
    assert not sampling(quiet, 0).detokenize
    assert not sampling(quiet, 0).ignore_eos
