"""The files of deploy/ match their schemas, and the names in them exist.

No test builds an image or connects to a cluster.
"""

import argparse
import copy
import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from jsonschema.validators import validator_for

from jaxspec.engine.arg_utils import AsyncEngineArgs
from jaxspec.serve import ray_app
from jaxspec.serve.app import make_app
from jaxspec.serve.flags import make_parser
from jaxspec.serve.launcher import FLUSH_TIMEOUT_S
from jaxspec.serve.settings import ServerSettings
from tests.support.fake_engines import serve

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def objects(name: str) -> dict[str, Any]:
    """Return the objects of a file, by kind."""
    found = list(yaml.safe_load_all((DEPLOY / name).read_text()))
    assert len({one["kind"] for one in found}) == len(found)
    return {one["kind"]: one for one in found}


REPLICAS, POOLED = objects("replicas.yaml"), objects("inferencepool.yaml")
(RAY,) = objects("rayservice.yaml").values()
RAY_CONFIG = yaml.safe_load(RAY["spec"]["serveConfigV2"])
((WORKERS,), HEAD) = (
    RAY["spec"]["rayClusterConfig"][name]
    for name in ("workerGroupSpecs", "headGroupSpec")
)
(WORKER,) = WORKERS["template"]["spec"]["containers"]
POD = REPLICAS["Deployment"]["spec"]["template"]
GROUPED = objects("lws.yaml")
GROUP = GROUPED["LeaderWorkerSet"]
LEADING, FOLLOWING = (
    GROUP["spec"]["leaderWorkerTemplate"][name]
    for name in ("leaderTemplate", "workerTemplate")
)
(LEADER,) = LEADING["spec"]["containers"]
(SERVER,) = POD["spec"]["containers"]


def definition(name: str, version: str) -> Any:
    """Return the published schema of a kind that is not part of Kubernetes.

    Schemas have a megabyte and more, so they are not in this repository. A test whose
    schema is missing is skipped.
    """
    path = ROOT.parent / "shared" / "k8s" / name
    if not path.exists():
        pytest.skip(f"no {path} here")
    # The C++ parser takes a second, the Python parser twenty.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    versions = yaml.load(path.read_text(), loader)["spec"]["versions"]
    (found,) = (one for one in versions if one["name"] == version)
    return strict(found["schema"]["openAPIV3Schema"])


def strict(schema: Any) -> Any:
    """Return a copy of a schema that rejects unknown fields; API servers only warn."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    known = {name: strict(one) for name, one in schema.items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and not is_open:
        known.setdefault("additionalProperties", False)
    return known


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions, each with its arguments."""
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    joined = text.replace("\\\n", " ").splitlines()
    found = [line.strip().partition(" ") for line in joined if line.strip()]
    return [(name, arguments.strip()) for name, _, arguments in found]


def argument_of(name: str) -> str:
    (arguments,) = (one for kind, one in instructions() if kind == name)
    return arguments


def test_image_has_the_wheels_sources():
    copied = [one.split()[:-1] for kind, one in instructions() if kind == "COPY"]
    sources = {name for names in copied for name in names}
    assert all((ROOT / name).exists() for name in sources)
    project = PROJECT["project"]
    needed = {"pyproject.toml", project["readme"], *project["license-files"]}
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    # License texts of bundled data are in a package.
    needed = {name.partition("/")[0] for name in (*needed, *packages)}
    assert sources == needed


def test_image_and_manifest_run_the_same_server():
    program, command, *flags = json.loads(argument_of("ENTRYPOINT"))
    assert f"{program} {command}" == "jaxspec serve"
    given = make_parser("x").parse_args([*flags, *SERVER["args"]])
    assert given.host == "0.0.0.0"
    (port,) = SERVER["ports"]
    assert str(given.port) == argument_of("EXPOSE") == str(port["containerPort"])
    folders = {one["mountPath"] for one in SERVER["volumeMounts"]}
    assert folders == set(json.loads(argument_of("VOLUME")))
    assert Path(given.compilation_cache_dir).parent.as_posix() in folders
    user = POD["spec"]["securityContext"]["runAsUser"]
    assert argument_of("USER") == f"{user}:{user}"
    volumes = {one["name"] for one in POD["spec"]["volumes"]}
    assert {one["name"] for one in SERVER["volumeMounts"]} == volumes
    chips = SERVER["resources"]["limits"]["google.com/tpu"]
    assert str(given.tensor_parallel_size) == chips
    assert SERVER["resources"]["requests"] == SERVER["resources"]["limits"]


def test_probes_use_existing_endpoints():
    async def use(engine: Any) -> None:
        app: Any = make_app(engine, ServerSettings())
        served = set(app.openapi()["paths"])
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = SERVER[name]["httpGet"]
            assert asked["path"] in served
            assert asked["port"] == SERVER["ports"][0]["name"]

    serve(use)
    # /health returns 503 until a program is compiled. Meanwhile, the pod must not be
    # restarted.
    startup = SERVER["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800


def test_all_selectors_match_the_same_pods():
    labels = POD["metadata"]["labels"]
    selectors = [
        REPLICAS["Deployment"]["spec"]["selector"]["matchLabels"],
        REPLICAS["Service"]["spec"]["selector"],
        REPLICAS["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        POOLED["InferencePool"]["spec"]["selector"]["matchLabels"],
    ]
    for selector in selectors:
        assert selector.items() <= labels.items()
    assert labels["llm-d.ai/inferenceServing"] == "true"
    (service,) = REPLICAS["Service"]["spec"]["ports"]
    assert service["targetPort"] == SERVER["ports"][0]["name"]
    (target,) = POOLED["InferencePool"]["spec"]["targetPorts"]
    assert target["number"] == SERVER["ports"][0]["containerPort"]
    ((backend,),) = (
        rule["backendRefs"] for rule in POOLED["HTTPRoute"]["spec"]["rules"]
    )
    assert backend["name"] == POOLED["InferencePool"]["metadata"]["name"]


@pytest.mark.parametrize(
    ("manifest", "file", "part"),
    [
        (RAY, "rayservice.yaml", "rayClusterConfig"),
        (GROUP, "lws.yaml", "leaderWorkerTemplate"),
    ],
    ids=["ray", "lws"],
)
def test_manifests_match_their_schemas(manifest, file: str, part: str):
    schema = definition(file, manifest["apiVersion"].partition("/")[2])
    assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
    # These schemas do not describe `metadata`, which Kubernetes defines.
    schema["properties"]["metadata"] = {"required": ["name"]}
    validator = validator_for(schema)(schema)
    validator.check_schema(schema)
    validator.validate(manifest)
    for change in ("hosts", "spec.hosts", f"spec.{part}.hosts"):
        place = wrong = copy.deepcopy(manifest)
        *path, name = change.split(".")
        for one in path:
            place = place[one]
        place[name] = {}
        # Not `match`: it would print the whole schema.
        with pytest.raises(jsonschema.ValidationError) as refused:
            validator.validate(wrong)
        assert f"'{name}' was unexpected" in refused.value.message


def of_host(rank: int) -> argparse.Namespace:
    """Return a host's parsed command line, with LeaderWorkerSet's variables set."""
    (container,) = (LEADING if rank == 0 else FOLLOWING)["spec"]["containers"]
    known = {"$(LWS_WORKER_INDEX)": str(rank), "$(LWS_LEADER_ADDRESS)": "leader"}
    given = []
    for argument in container["args"]:
        for name, value in known.items():
            argument = argument.replace(name, value)
        assert "$(" not in argument
        given.append(argument)
    return make_parser("x").parse_args(given)


def test_all_hosts_have_the_same_command_line():
    size = GROUP["spec"]["leaderWorkerTemplate"]["size"]
    lines = [of_host(rank) for rank in range(size)]
    arguments = [AsyncEngineArgs.from_cli_args(one) for one in lines]
    configs = [one.read_hosts() for one in arguments]
    for rank, config in enumerate(configs):
        assert config is not None
        assert (config.nnodes, config.node_rank) == (size, rank)
        assert config.is_follower == bool(rank)
        own = dataclasses.replace(config, node_rank=0, headless=False)
        assert own == configs[0]
    leader = {"node_rank": 0, "headless": False}
    # Apart from rank and headless mode, all hosts have the same engine arguments.
    known = [
        {**vars(one), "model": line.model_tag} | leader
        for one, line in zip(arguments, lines, strict=True)
    ]
    assert all(one == known[0] for one in known)
    chips = size * int(LEADER["resources"]["limits"]["google.com/tpu"])
    assert arguments[0].tensor_parallel_size == chips
    topology = LEADING["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    assert math.prod(map(int, topology.split("x"))) == chips
    draft = arguments[0].speculative_draft_tensor_parallel_size
    assert draft is not None and draft <= chips // size, "a draft within a host"
    ports = {one["name"]: one["containerPort"] for one in LEADER["ports"]}
    assert ports["jax"] == arguments[0].master_port
    assert configs[0] is not None and ports["plans"] == configs[0].plans_port
    assert ports["http"] == lines[0].port


def test_pods_have_time_to_shut_down():
    line = make_parser("x").parse_args(SERVER["args"])
    for templates, container, given in (
        ([POD], SERVER, line),
        ([LEADING, FOLLOWING], LEADER, of_host(0)),
    ):
        pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        needed = pause + given.shutdown_timeout + FLUSH_TIMEOUT_S
        for template in templates:
            assert template["spec"]["terminationGracePeriodSeconds"] > needed


def test_hosts_have_a_secret():
    for template in (LEADING, FOLLOWING):
        (container,) = template["spec"]["containers"]
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        volumes = {one["name"]: one for one in template["spec"]["volumes"]}
        assert mounts.keys() == volumes.keys()
        assert "secret" in volumes["hosts"] and mounts["hosts"] == "/hosts"
        assert set(json.loads(argument_of("VOLUME"))) < set(mounts.values())
    assert Path(of_host(0).hosts_secret_file).parent.as_posix() == "/hosts"
    # If one process ends, all end, so all pods must be restarted together.
    policy = GROUP["spec"]["leaderWorkerTemplate"]["restartPolicy"]
    assert policy == "RecreateGroupOnPodRestart"
    # Only the leader receives requests.
    selector = GROUPED["Service"]["spec"]["selector"]
    assert selector.items() <= LEADING["metadata"]["labels"].items()
    assert "labels" not in FOLLOWING.get("metadata", {})


def test_ray_serves_the_existing_application():
    (application,) = RAY_CONFIG["applications"]
    module, _, name = application["import_path"].partition(":")
    assert (module, getattr(ray_app, name)) == (ray_app.__name__, ray_app.build)
    options, placement = ray_app.read_arguments(application["args"])
    assert options.engine.speculative_model is not None
    chips = options.engine.tensor_parallel_size
    limits = WORKER["resources"]["limits"]
    assert limits["google.com/tpu"] == str(chips)
    assert placement.ray_actor_options is not None
    assert placement.ray_actor_options["resources"] == {"TPU": chips}
    assert placement.ray_actor_options["num_cpus"] <= int(limits["cpu"])
    # A replica uses all chips of a worker, so each worker has at most one replica.
    (deployment,) = application["deployments"]
    assert deployment["name"] == ray_app.NAME
    scaling = deployment["autoscaling_config"]
    assert scaling["max_replicas"] == WORKERS["maxReplicas"]
    assert scaling["min_replicas"] == WORKERS["minReplicas"] == WORKERS["replicas"]
    assert scaling["target_ongoing_requests"] < placement.max_ongoing_requests
    ports = {one["name"]: one["containerPort"] for one in WORKER["ports"]}
    listening = RAY_CONFIG["http_options"]
    assert ports == {"serve": listening["port"], "metrics": placement.metrics_port}
    assert listening["host"] == placement.metrics_host == "0.0.0.0"
    grace = WORKERS["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > options.shutdown_timeout + FLUSH_TIMEOUT_S


def test_ray_has_an_image_with_ray():
    extra = PROJECT["project"]["optional-dependencies"]["ray"]
    (least,) = (
        one.removeprefix("ray[serve]>=") for one in extra if one.startswith("ray")
    )
    version = RAY["spec"]["rayClusterConfig"]["rayVersion"]
    assert version.split(".")[:2] == least.split(".")
    (head,) = HEAD["template"]["spec"]["containers"]
    assert head["image"] == WORKER["image"]
    user = argument_of("USER").partition(":")[0]
    for spec in (HEAD["template"]["spec"], WORKERS["template"]["spec"]):
        assert str(spec["securityContext"]["runAsUser"]) == user
    folders = {one["mountPath"] for one in WORKER["volumeMounts"]}
    assert folders == set(json.loads(argument_of("VOLUME")))


@pytest.mark.parametrize(
    ("extra", "extras", "package"),
    [
        ("cpu", "serve,hub,kaggle", "g++"),
        ("tpu", "serve,hub,kaggle,tpu", ""),
        ("cuda,ray", "serve,hub,kaggle,cuda,ray", "wget"),
    ],
)
def test_extras_of_the_image_follow_the_build_argument(extra, extras, package):
    """The test runs the first lines of the Dockerfile's `RUN` in a shell."""
    begin = argument_of("RUN").partition("&& if")[0]
    said = f'EXTRA={extra}; {begin}; echo "$extras $package"'
    done = subprocess.run(["sh", "-ec", said], capture_output=True, text=True)
    assert done.stdout.strip() == f"{extras} {package}".strip(), done.stderr
    known = PROJECT["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(known)


@pytest.mark.parametrize("kind", REPLICAS)
def test_replicas_match_the_kubernetes_schema(kind: str):
    schemas = pytest.importorskip("kubernetes_validate")
    schemas.validate(REPLICAS[kind], "1.31", strict=True)
    wrong = REPLICAS[kind] | {"specs": {}}
    with pytest.raises(schemas.ValidationError):
        schemas.validate(wrong, "1.31", strict=True)


def test_dockerfile_passes_the_linter():
    places = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"
    linter = shutil.which("hadolint", path=places)
    if linter is None:
        pytest.skip("no hadolint here")
    command = [linter, "--failure-threshold", "warning", DEPLOY / "Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
