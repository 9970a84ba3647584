"""The command line: vLLM's names, the engine's flags, what runs."""

from pathlib import Path

import pytest

from jaxspec.bench.flags import MODULES, dataset, make_parser
from jaxspec.engine.model_folders import BUNDLED_TARGET
from jaxspec.serve.flags import engine_args


def read(*arguments):
    return make_parser("prog").parse_args(arguments)


def test_every_subcommand_has_a_module():
    for name in MODULES:
        assert read(name).command == name
    assert read().command is None


@pytest.mark.parametrize("name", ["latency", "throughput", "spec"])
def test_offline_takes_every_flag_of_the_engine(name):
    options = read(name)
    assert engine_args(vars(options)).model == BUNDLED_TARGET
    options = read(name, "--model", "m", "--max-num-seqs", "3", "--block-size", "32")
    engine = engine_args(vars(options))
    assert (engine.model, engine.max_num_seqs, engine.block_size) == ("m", 3, 32)
    assert engine.speculative_model is None


def test_vllms_command_lines_are_read():
    options = read(
        *("latency", "--input-len", "16", "--output-len", "8", "--batch-size", "4"),
        *("--num-iters", "5", "--num-iters-warmup", "2", "--disable-detokenize"),
    )
    assert (options.input_len, options.output_len, options.batch_size) == (16, 8, 4)
    assert (options.num_iters, options.num_iters_warmup) == (5, 2)
    assert options.disable_detokenize
    options = read(
        *("serve", "--dataset-name", "random", "--random-input-len", "9"),
        *("--random-output-len", "7", "--num-prompts", "3", "--request-rate", "inf"),
        *("--max-concurrency", "2", "--goodput", "ttft:9", "--percentile-metrics"),
        *("ttft,e2el", "--metric-percentiles", "50,99", "--save-result"),
        *("--extra-body", '{"a": 1}'),
    )
    assert (options.input_len, options.output_len) == (9, 7)
    assert options.request_rate == [float("inf")]
    assert options.max_concurrency == [2]
    assert options.extra_body == {"a": 1}


def test_every_subcommand_can_draw():
    for name in MODULES:
        assert read(name).plot is None
        assert read(name, "--plot", "a.svg").plot == Path("a.svg")


def test_a_file_of_prompts_needs_no_name(tmp_path):
    path = tmp_path / "prompts.jsonl"
    assert dataset(read("latency")).name == "bundled"
    assert dataset(read("latency", "--dataset-path", str(path))).path == path
    found = dataset(read("serve", "--dataset-name", "prefix_repetition", "--seed", "5"))
    assert (found.name, found.prefix_len, found.seed) == ("prefix_repetition", 256, 5)


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--extra-body", "{"],
        ["serve", "--extra-body", "[]"],
        ["latency", "--dataset-name", "sharegpt"],
        ["latency", "--request-rate", "1"],
        ["serve", "--max-num-seqs", "1"],
        ["nothing"],
    ],
)
def test_wrong_forms_end_the_program(arguments):
    with pytest.raises(SystemExit) as end:
        read(*arguments)
    assert end.value.code == 2
