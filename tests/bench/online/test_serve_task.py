"""What `serve` is asked to do, and what is refused before anything is sent."""

import json

import pytest

from jaxspec.bench.flags import make_parser
from jaxspec.bench.online.serve_task import Task, read_task
from jaxspec.errors import ConfigError


def task_of(*arguments: str) -> Task:
    return read_task(make_parser("prog").parse_args(["serve", *arguments]))


def test_a_sweep_has_all_pairs():
    task = task_of("--request-rate", "1", "inf", "--max-concurrency", "2", "4")
    pairs = [(load.request_rate, load.max_concurrency) for load in task.loads]
    assert pairs == [(1, 2), (1, 4), (float("inf"), 2), (float("inf"), 4)]
    alone = task_of()
    assert [load.max_concurrency for load in alone.loads] == [None]
    assert len(alone.prompts) == 100


def test_the_address_is_a_url_or_host_and_port():
    assert task_of().address.netloc == "127.0.0.1:8000"
    assert task_of("--host", "::1", "--port", "9").address.netloc == "[::1]:9"
    assert task_of("--base-url", "http://h:1", "--port", "9").address.netloc == "h:1"


def test_what_is_told():
    wanted = task_of(
        *("--percentile-metrics", "ttft,e2el", "--metric-percentiles", "50,99.9"),
        *("--goodput", "ttft:200", "tpot:50.5"),
    ).wanted
    assert list(wanted.metrics) == ["ttft", "e2el"]
    assert list(wanted.percentiles) == [50, 99.9]
    assert wanted.goodput_ms == {"ttft": 200, "tpot": 50.5}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--endpoint /v1/embeddings", "--endpoint must be a path"),
        ("--endpoint v1/completions", "--endpoint must be a path"),
        ("--num-prompts 0", "--num-prompts must be"),
        ("--output-len 0", "--output-len must be"),
        ("--num-warmups -1", "--num-warmups must be"),
        ("--request-rate 0", "--request-rate must be above 0"),
        ("--request-rate nan", "--request-rate must be above 0"),
        ("--max-concurrency 0", "--max-concurrency must be"),
        ("--burstiness 0", "--burstiness must be"),
        ("--percentile-metrics ttft,x", "--percentile-metrics must be some of"),
        ("--metric-percentiles 50,x", "--metric-percentiles must be numbers"),
        ("--metric-percentiles 101", "--metric-percentiles must be a number in"),
        ("--goodput itl:3", "--goodput must be NAME:MILLISECONDS"),
        ("--goodput ttft", "--goodput must be NAME:MILLISECONDS"),
        ("--save-result --result-dir none", "--result-dir must be a file in a folder"),
        ("--plot x.jpg", "--plot must be a file that ends in"),
        ("--dataset-path none.jsonl", "--dataset-path must be a file"),
    ],
)
def test_wrong_values_are_named(arguments, said):
    with pytest.raises(ConfigError, match=said):
        task_of(*arguments.split())


def test_a_sweep_into_one_file_is_a_line_a_point(tmp_path):
    flags = ("--result-dir", str(tmp_path), "--result-filename", "x.json")
    task = task_of("--max-concurrency", "1", "2", "--save-result", *flags)
    path = tmp_path / "x.json"
    for _ in range(2):  # the second sweep begins anew
        for number, load in enumerate(task.loads):
            task.save({"number": number}, load)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"number": 0},
        {"number": 1},
    ]
    task_of("--append-result", *flags).save({"number": 2}, task.loads[0])
    assert len(path.read_text().splitlines()) == 3


def test_without_being_asked_nothing_is_written(tmp_path):
    task = task_of("--result-dir", str(tmp_path))
    task.save({}, task.loads[0])
    assert not list(tmp_path.iterdir())
    task = task_of("--result-dir", str(tmp_path), "--save-detailed")
    task.save({}, task.loads[0])
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("serve-infqps-concurrencyany-")
