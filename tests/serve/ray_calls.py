"""Kills and scales replicas under Ray Serve, and compares their texts.

test_ray_app.py runs this in a network namespace, because Ray listens on all interfaces
of a machine; prints one line of JSON. To run it alone with Ray installed:

    unshare -n sh -c 'ip link set lo up; HOME=FOLDER JAXSPEC_TEST_DELAY=FOLDER/delay \
        python -m tests.serve.ray_calls FOLDER replicas'
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import ray
import yaml
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.serve.schema import ServeDeploySchema

from jaxspec import LLM, SamplingParams
from jaxspec.config.structured_outputs import StructuredOutputsParams
from jaxspec.serve.flags import Options
from jaxspec.serve.ray_app import (
    NAME,
    Placement,
    Replica,
    build,
    make_application,
    read_arguments,
)
from tests.support.fake_engines import before_launches

ENGINE: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 512}
METRICS_PORT = 8100
PROMPTS = [f"Once upon a time there was a {one}" for one in ("fox", "girl", "king")]
SHORT: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}]
REGEX = r" of (red|green) hats and [0-9]{2} (foxes|kings)\."
NUM_STREAMS = 4
LONG = 160
PATIENCE_S = 240
DELAY_FILE = "JAXSPEC_TEST_DELAY"

Text = tuple[str | None, str]


class Slow(Replica):
    """A replica that delays each launch by the number of seconds in a file."""

    def __init__(self, options: Options, placement: Placement):
        super().__init__(options, placement)
        file = Path(os.environ[DELAY_FILE])
        runner = self.engine.engine.runner
        before_launches(runner, lambda: time.sleep(float(file.read_text())))


def set_delay(seconds: float) -> None:
    file = Path(os.environ[DELAY_FILE])
    new = file.with_suffix(".new")
    new.write_text(str(seconds))
    new.replace(file)  # atomic


def expected_texts(asked: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return the texts that one process generates without a server."""
    asked = list(asked)
    options, _ = read_arguments(ENGINE)
    engine = options.engine
    llm = LLM(
        model=engine.model,
        speculative_model=engine.speculative_model,
        num_speculative_tokens=engine.num_speculative_tokens,
        **ENGINE,
    )
    prompts, params = [one for one, _ in asked], [SamplingParams(**p) for _, p in asked]
    return [one.outputs[0].text for one in llm.generate(prompts, params)]


def stream(client: openai.OpenAI, prompt: str, session: str = "", **asked: Any) -> Text:
    """Return the finish reason (None if the stream broke off) and the text."""
    text, ended = "", None
    headers = {"X-Session-Id": session} if session else {}
    try:
        for chunk in client.completions.create(
            model="gemma", prompt=prompt, stream=True, extra_headers=headers, **asked
        ):
            text += chunk.choices[0].text
            ended = chunk.choices[0].finish_reason or ended
    except (openai.APIError, httpx.HTTPError):
        return None, text
    return ended, text


def wait_for(done: Callable[[], bool]) -> float:
    """Wait until a condition holds; return the seconds that it took."""
    start = time.monotonic()
    while not done():
        assert time.monotonic() < start + PATIENCE_S, serve.status()
        time.sleep(0.1)
    return time.monotonic() - start


def states() -> dict[str, int]:
    application = serve.status().applications.get(NAME)
    if application is None or NAME not in application.deployments:
        return {}
    found = application.deployments[NAME].replica_states
    return {getattr(state, "value", state): count for state, count in found.items()}


def metric_values(name: str) -> dict[int, int]:
    """Return a metric of each replica that responds, by its metrics port."""
    found: dict[int, int] = {}
    for port in range(METRICS_PORT, METRICS_PORT + 4):
        try:
            text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        except httpx.HTTPError:
            continue
        families = text_string_to_metric_families(text)
        samples = [one for family in families for one in family.samples]
        found[port] = int(sum(one.value for one in samples if one.name == name))
    return found


def num_served() -> dict[int, int]:
    return metric_values("vllm:request_success_total")


def num_running() -> dict[int, int]:
    return metric_values("vllm:num_requests_running")


def deploy(**placement: Any) -> None:
    options, placed = read_arguments(
        ENGINE
        | {"served_model_name": "gemma", "shutdown_timeout": 60}
        | {"metrics_port": METRICS_PORT, "ray_actor_options": {"num_cpus": 0.5}}
        | placement
    )
    application = make_application(options, placed, Slow)
    serve.run(application, name=NAME, route_prefix="/")


def request_texts(
    client: openai.OpenAI, asked: list[tuple[str, dict[str, Any]]]
) -> list[Text]:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        futures = [pool.submit(stream, client, prompt, **how) for prompt, how in asked]
        return [one.result() for one in futures]


def begin_streams(
    pool: ThreadPoolExecutor, client: openai.OpenAI, asked: list[tuple[str, Any]]
) -> list[Future[Text]]:
    """Start slow, long streams; return when all have begun.

    Streams start one after the other: Ray routes a request to the replica with fewer
    requests, but may route several at once to the same replica. Meanwhile they are so
    slow that none ends, also on a busy machine.
    """
    set_delay(1.0)
    futures: list[Future[Text]] = []
    for prompt, how in asked:
        futures.append(pool.submit(stream, client, prompt, **how))
        wait_for(lambda: sum(num_running().values()) == len(futures))
    set_delay(0.2)
    return futures


def manifest() -> list[str]:
    """Let Ray parse the manifest for KubeRay; return the import paths in it."""
    service = yaml.safe_load(Path("deploy/rayservice.yaml").read_text())
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    applications = ServeDeploySchema.model_validate(config).applications
    for one in applications:
        build(one.args)
    return [one.import_path for one in applications]


def start_ray() -> openai.OpenAI:
    """Start Ray and its proxy on this machine; return a client of the proxy."""
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=100 * 2**20,
        _temp_dir=str(Path(sys.argv[1]) / "ray"),
        log_to_driver=False,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": 8000})
    return openai.OpenAI(
        base_url="http://127.0.0.1:8000/v1", api_key="none", max_retries=0
    )


def process_of(actor: str) -> psutil.Process:
    """Return the process of the only actor of a class, by Ray's process title."""

    def found() -> list[psutil.Process]:
        every = psutil.process_iter(["cmdline"])
        return [one for one in every if f"ray::{actor}" in str(one.info["cmdline"])]

    wait_for(lambda: len(found()) == 1)
    return found()[0]


def several_hosts() -> None:
    """Run one replica of two processes, and kill each once; print the results."""
    asked: list[tuple[str, dict[str, Any]]]
    asked = [(one, how | {"max_tokens": 24}) for one in PROMPTS for how in SHORT]
    results: dict[str, Any] = {"texts": expected_texts(asked)}
    prompt, how = asked[0]
    set_delay(0)
    client = start_ray()
    deploy(hosts=2, placement_group_strategy="PACK", tensor_parallel_size=2)
    results["from_two"] = [text for _, text in request_texts(client, asked)]
    for who in ("HostProcess", "ServeReplica"):
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            long = (prompt, how | {"max_tokens": LONG})
            futures = begin_streams(pool, client, [long] * 2)
            process_of(who).kill()
            start = time.monotonic()
            results[f"{who} cut"] = [one.result()[0] for one in futures].count(None)
            set_delay(0)
            # No response is returned until the whole group has restarted; then the
            # texts are the same.
            wait_for(lambda: stream(client, prompt, **how)[0] is not None)
            results[f"{who} back_s"] = time.monotonic() - start
        results[f"after {who}"] = [text for _, text in request_texts(client, asked)]
    serve.shutdown()
    ray.shutdown()
    print(json.dumps(results))


def replicas() -> None:
    """Run all scenarios with replicas of one process, and print the results."""
    short = [(one, how | {"max_tokens": 40}) for one in PROMPTS for how in SHORT] * 2
    # Each replica compiles the program with masks, because it cannot be cached.
    masked = [(one, {"temperature": 0.0, "max_tokens": 24}) for one in PROMPTS[:2]]
    long = [
        (PROMPTS[number % 3], SHORT[number % 2] | {"max_tokens": LONG})
        for number in range(NUM_STREAMS)
    ]
    results: dict[str, Any] = {"manifest": manifest()}
    grammar = StructuredOutputsParams(regex=REGEX)
    whole = expected_texts(
        [
            *short,
            *long,
            *((one, how | {"structured_outputs": grammar}) for one, how in masked),
        ]
    )
    results["texts"], whole = whole[: len(short)], whole[len(short) :]
    long_expected, results["masked_texts"] = whole[:NUM_STREAMS], whole[NUM_STREAMS:]

    def count_outcomes(texts: list[Text]) -> dict[str, int]:
        """Count the texts that equal those of one process, broke off, or differ."""
        kinds: Counter[str] = Counter()
        for (ended, text), right in zip(texts, long_expected, strict=True):
            is_same = text == right
            kinds["cut" if ended is None else "same" if is_same else "other"] += 1
        return dict(kinds)

    set_delay(0)
    client = start_ray()

    # Run two replicas, without scaling.
    deploy(num_replicas=2, session_affinity=True)
    results["models"] = [one.id for one in client.models.list()]
    results["from_replicas"] = [text for _, text in request_texts(client, short)]
    results["answered"] = num_served()
    body = {"structured_outputs": {"regex": REGEX}}
    results["masked_from_replicas"] = [
        text
        for _, text in request_texts(
            client, [(one, how | {"extra_body": body}) for one, how in masked]
        )
    ]
    results["answered_before_session"] = num_served()
    for _ in range(6):
        stream(client, PROMPTS[0], session="one", max_tokens=2)
    results["answered_with_session"] = num_served()

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        futures = begin_streams(pool, client, long)
        before = results["running_before_kill"] = num_running()
        names = [
            one["name"]
            for one in ray.util.list_named_actors(all_namespaces=True)
            if one["name"].startswith("SERVE_REPLICA::")
        ]
        ray.kill(ray.get_actor(names[0], namespace="serve"), no_restart=True)
        wait_for(lambda: len(num_running()) < len(before))
        (dead,) = before.keys() - num_running().keys()
        results["ran_on_the_killed"] = before[dead]
        set_delay(0.02)
        results["after_kill"] = count_outcomes([one.result() for one in futures])
    set_delay(0)
    results["replaced_s"] = wait_for(
        lambda: states() == {"RUNNING": 2} and len(num_running()) == 2
    )
    results["after_replacement"] = [text for _, text in request_texts(client, short)]
    serve.delete(NAME)

    # The load is low, so Ray scales two replicas down to one.
    scaling = {"min_replicas": 1, "initial_replicas": 2, "max_replicas": 2}
    scaling |= {"target_ongoing_requests": 100, "look_back_period_s": 2}
    scaling |= {"downscale_delay_s": 6, "metrics_interval_s": 1}
    deploy(autoscaling_config=scaling)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        futures = begin_streams(pool, client, long)
        results["running_before_scaling"] = num_running()
        wait_for(lambda: states().get("RUNNING") == 1)
        results["states_while_draining"] = states()
        results["running_while_draining"] = num_running()
        results["unfinished_while_draining"] = sum(not one.done() for one in futures)
        set_delay(0.02)
        results["after_scaling"] = count_outcomes([one.result() for one in futures])
    set_delay(0)
    wait_for(lambda: states() == {"RUNNING": 1})
    wait_for(lambda: len(num_running()) == 1)
    results["after_all"] = [text for _, text in request_texts(client, short)]
    serve.shutdown()
    ray.shutdown()
    print(json.dumps(results))


if __name__ == "__main__":
    {"replicas": replicas, "hosts": several_hosts}[sys.argv[2]]()
