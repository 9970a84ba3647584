"""Replicas under Ray Serve, killed and scaled, and what became of their texts.

Run by test_ray_app.py in a network of its own, as Ray listens on all interfaces of a
machine; prints one line of JSON. By hand, where Ray is installed:

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
    """A replica whose launches take as long as a file says, in seconds."""

    def __init__(self, options: Options, placement: Placement):
        super().__init__(options, placement)
        runner: Any = self.engine.engine.runner
        launch, file = runner.launch, Path(os.environ[DELAY_FILE])

        def delayed(*arguments: Any) -> Any:
            time.sleep(float(file.read_text()))
            return launch(*arguments)

        runner.launch = delayed


def set_delay(seconds: float) -> None:
    file = Path(os.environ[DELAY_FILE])
    new = file.with_suffix(".new")
    new.write_text(str(seconds))
    new.replace(file)  # never half of it


def alone(asked: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
    """What one process says, without a server."""
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
    """How a text ended, None if it was cut, and what there is of it."""
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
    """Wait until it is so; returns the seconds that took."""
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


def counted(name: str) -> dict[int, int]:
    """A metric of each replica that answers, by the port of its metrics."""
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


def answered() -> dict[int, int]:
    return counted("vllm:request_success_total")


def running() -> dict[int, int]:
    return counted("vllm:num_requests_running")


def deploy(**placement: Any) -> None:
    options, placed = read_arguments(
        ENGINE
        | {"served_model_name": "gemma", "shutdown_timeout": 60}
        | {"metrics_port": METRICS_PORT, "ray_actor_options": {"num_cpus": 0.5}}
        | placement
    )
    application = make_application(options, placed, Slow)
    serve.run(application, name=NAME, route_prefix="/")


def asked_texts(
    client: openai.OpenAI, asked: list[tuple[str, dict[str, Any]]]
) -> list[Text]:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        told = [pool.submit(stream, client, prompt, **how) for prompt, how in asked]
        return [one.result() for one in told]


def begin_streams(
    pool: ThreadPoolExecutor, client: openai.OpenAI, asked: list[tuple[str, Any]]
) -> list[Future[Text]]:
    """Begin long texts, slowly; returns when all are written.

    One after the other: Ray gives a text to the replica with fewer, but several at once
    may all go to the same.
    """
    set_delay(0.2)
    futures: list[Future[Text]] = []
    for prompt, how in asked:
        futures.append(pool.submit(stream, client, prompt, **how))
        wait_for(lambda: sum(running().values()) == len(futures))
    return futures


def manifest() -> list[str]:
    """Have Ray read the manifest for KubeRay; returns what it imports."""
    service = yaml.safe_load(Path("deploy/rayservice.yaml").read_text())
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    applications = ServeDeploySchema.model_validate(config).applications
    for one in applications:
        build(one.args)
    return [one.import_path for one in applications]


def start_ray() -> openai.OpenAI:
    """Start Ray and its proxy on this machine; returns a client of what it serves."""
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
    """The process of the only actor of a class, which Ray names by what it runs."""

    def found() -> list[psutil.Process]:
        every = psutil.process_iter(["cmdline"])
        return [one for one in every if f"ray::{actor}" in str(one.info["cmdline"])]

    wait_for(lambda: len(found()) == 1)
    return found()[0]


def several_hosts() -> None:
    """One replica of two processes, each killed once, and what became of its texts."""
    asked: list[tuple[str, dict[str, Any]]]
    asked = [(one, how | {"max_tokens": 24}) for one in PROMPTS for how in SHORT]
    told: dict[str, Any] = {"texts": alone(asked)}
    prompt, how = asked[0]
    set_delay(0)
    client = start_ray()
    deploy(hosts=2, placement_group_strategy="PACK", tensor_parallel_size=2)
    told["from_two"] = [text for _, text in asked_texts(client, asked)]
    for who in ("HostProcess", "ServeReplica"):
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            long = (prompt, how | {"max_tokens": LONG})
            futures = begin_streams(pool, client, [long] * 2)
            process_of(who).kill()
            start = time.monotonic()
            told[f"{who} cut"] = [one.result()[0] for one in futures].count(None)
            set_delay(0)
            # Nothing answers until the group is there again, and then as before.
            wait_for(lambda: stream(client, prompt, **how)[0] is not None)
            told[f"{who} back_s"] = time.monotonic() - start
        told[f"after {who}"] = [text for _, text in asked_texts(client, asked)]
    serve.shutdown()
    ray.shutdown()
    print(json.dumps(told))


def replicas() -> None:
    """Do all of it, and print what happened."""
    short = [(one, how | {"max_tokens": 40}) for one in PROMPTS for how in SHORT] * 2
    # The program with masks is compiled in each replica: kept are only those without.
    masked = [(one, {"temperature": 0.0, "max_tokens": 24}) for one in PROMPTS[:2]]
    long = [
        (PROMPTS[number % 3], SHORT[number % 2] | {"max_tokens": LONG})
        for number in range(NUM_STREAMS)
    ]
    told: dict[str, Any] = {"manifest": manifest()}
    grammar = StructuredOutputsParams(regex=REGEX)
    whole = alone(
        [
            *short,
            *long,
            *((one, how | {"structured_outputs": grammar}) for one, how in masked),
        ]
    )
    told["texts"], whole = whole[: len(short)], whole[len(short) :]
    long_expected, told["masked_texts"] = whole[:NUM_STREAMS], whole[NUM_STREAMS:]

    def judged(texts: list[Text]) -> dict[str, int]:
        """How many were as from one process, cut, or something else."""
        kinds: Counter[str] = Counter()
        for (ended, text), right in zip(texts, long_expected, strict=True):
            is_same = text == right
            kinds["cut" if ended is None else "same" if is_same else "other"] += 1
        return dict(kinds)

    set_delay(0)
    client = start_ray()

    # Two replicas that are there for good.
    deploy(num_replicas=2, session_affinity=True)
    told["models"] = [one.id for one in client.models.list()]
    told["from_replicas"] = [text for _, text in asked_texts(client, short)]
    told["answered"] = answered()
    body = {"structured_outputs": {"regex": REGEX}}
    told["masked_from_replicas"] = [
        text
        for _, text in asked_texts(
            client, [(one, how | {"extra_body": body}) for one, how in masked]
        )
    ]
    told["answered_before_session"] = answered()
    for _ in range(6):
        stream(client, PROMPTS[0], session="one", max_tokens=2)
    told["answered_with_session"] = answered()

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        futures = begin_streams(pool, client, long)
        before = told["running_before_kill"] = running()
        names = [
            one["name"]
            for one in ray.util.list_named_actors(all_namespaces=True)
            if one["name"].startswith("SERVE_REPLICA::")
        ]
        ray.kill(ray.get_actor(names[0], namespace="serve"), no_restart=True)
        wait_for(lambda: len(running()) < len(before))
        (dead,) = before.keys() - running().keys()
        told["ran_on_the_killed"] = before[dead]
        set_delay(0.02)
        told["after_kill"] = judged([one.result() for one in futures])
    set_delay(0)
    told["replaced_s"] = wait_for(
        lambda: states() == {"RUNNING": 2} and len(running()) == 2
    )
    told["after_replacement"] = [text for _, text in asked_texts(client, short)]
    serve.delete(NAME)

    # Two that become one, as there is too little to do.
    scaling = {"min_replicas": 1, "initial_replicas": 2, "max_replicas": 2}
    scaling |= {"target_ongoing_requests": 100, "look_back_period_s": 2}
    scaling |= {"downscale_delay_s": 6, "metrics_interval_s": 1}
    deploy(autoscaling_config=scaling)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        futures = begin_streams(pool, client, long)
        told["running_before_scaling"] = running()
        wait_for(lambda: states().get("RUNNING") == 1)
        told["states_while_draining"] = states()
        told["running_while_draining"] = running()
        told["unfinished_while_draining"] = sum(not one.done() for one in futures)
        set_delay(0.02)
        told["after_scaling"] = judged([one.result() for one in futures])
    set_delay(0)
    wait_for(lambda: states() == {"RUNNING": 1})
    wait_for(lambda: len(running()) == 1)
    told["after_all"] = [text for _, text in asked_texts(client, short)]
    serve.shutdown()
    ray.shutdown()
    print(json.dumps(told))


if __name__ == "__main__":
    {"replicas": replicas, "hosts": several_hosts}[sys.argv[2]]()
