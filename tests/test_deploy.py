"""The files of deploy/: what they name exists, and they are what their readers take.

Nothing here builds an image or talks to a cluster.
"""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from jaxspec.serve.app import make_app
from jaxspec.serve.flags import make_parser
from jaxspec.serve.launcher import LAST_WORDS_S
from jaxspec.serve.settings import ServerSettings
from tests.engine.test_async_llm_engine import serve

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

NAME = {"type": "string", "minLength": 1, "maxLength": 253}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
NUMBERED = {
    "type": "object",
    "properties": {"number": PORT},
    "required": ["number"],
    "additionalProperties": False,
}
# Of the InferencePool, v1, as its project publishes it: all fields of its `spec`.
POOL: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["selector", "targetPorts"],
    "properties": {
        "appProtocol": {"enum": ["http", "kubernetes.io/h2c"]},
        "selector": {
            "type": "object",
            "additionalProperties": False,
            "required": ["matchLabels"],
            "properties": {
                "matchLabels": {
                    "type": "object",
                    "minProperties": 1,
                    "maxProperties": 64,
                    "additionalProperties": {"type": "string", "maxLength": 63},
                }
            },
        },
        "targetPorts": {
            "type": "array",
            "minItems": 1,
            "maxItems": 8,
            "items": NUMBERED,
        },
        "endpointPickerRef": {
            "type": "object",
            "additionalProperties": False,
            "required": ["name"],
            "properties": {
                "failureMode": {"enum": ["FailOpen", "FailClose"]},
                "group": {"type": "string", "maxLength": 253},
                "kind": {"type": "string", "minLength": 1, "maxLength": 63},
                "name": NAME,
                "port": NUMBERED,
            },
        },
    },
}


def objects(name: str) -> dict[str, Any]:
    """The objects of a file, by kind."""
    found = list(yaml.safe_load_all((DEPLOY / name).read_text()))
    assert len({one["kind"] for one in found}) == len(found)
    return {one["kind"]: one for one in found}


REPLICAS, POOLED = objects("replicas.yaml"), objects("inferencepool.yaml")
POD = REPLICAS["Deployment"]["spec"]["template"]
(SERVER,) = POD["spec"]["containers"]


def instructions() -> list[tuple[str, str]]:
    """What the Dockerfile says, an instruction and its arguments each."""
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    joined = text.replace("\\\n", " ").splitlines()
    found = [line.strip().partition(" ") for line in joined if line.strip()]
    return [(name, arguments.strip()) for name, _, arguments in found]


def told(name: str) -> str:
    (arguments,) = (one for kind, one in instructions() if kind == name)
    return arguments


def test_the_image_has_what_the_wheel_is_made_of():
    copied = [one.split()[:-1] for kind, one in instructions() if kind == "COPY"]
    sources = {name for names in copied for name in names}
    assert all((ROOT / name).exists() for name in sources)
    project = PROJECT["project"]
    needed = {"pyproject.toml", project["readme"], *project["license-files"]}
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed |= {name.partition("/")[0] for name in packages}
    assert sources == needed


def test_extras_of_the_image_are_extras_of_the_project():
    run = told("RUN")
    extras = set(PROJECT["project"]["optional-dependencies"])
    (always,) = re.findall(r"extras=([a-z,]+)", run)[:1]
    assert set(always.split(",")) <= extras
    assert {"tpu", "cuda"} <= extras
    assert told("ARG") == "EXTRA=cpu"
    version = told("FROM").removeprefix("python:").removesuffix("-slim")
    least = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert [int(x) for x in version.split(".")] >= [int(x) for x in least.split(".")]


def test_image_and_manifest_run_the_server_alike():
    program, command, *flags = json.loads(told("ENTRYPOINT"))
    assert f"{program} {command}" == "jaxspec serve"
    given = make_parser("x").parse_args([*flags, *SERVER["args"]])
    assert given.host == "0.0.0.0"
    (port,) = SERVER["ports"]
    assert str(given.port) == told("EXPOSE") == str(port["containerPort"])
    folders = {one["mountPath"] for one in SERVER["volumeMounts"]}
    assert folders == set(json.loads(told("VOLUME")))
    assert Path(given.compilation_cache_dir).parent.as_posix() in folders
    user = POD["spec"]["securityContext"]["runAsUser"]
    assert told("USER") == f"{user}:{user}"
    volumes = {one["name"] for one in POD["spec"]["volumes"]}
    assert {one["name"] for one in SERVER["volumeMounts"]} == volumes
    chips = SERVER["resources"]["limits"]["google.com/tpu"]
    assert str(given.tensor_parallel_size) == chips
    assert SERVER["resources"]["requests"] == SERVER["resources"]["limits"]


def test_a_pod_has_time_to_end():
    given = make_parser("x").parse_args(SERVER["args"])
    pause = SERVER["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed = pause + given.shutdown_timeout + LAST_WORDS_S
    assert POD["spec"]["terminationGracePeriodSeconds"] > needed


def test_probes_ask_what_is_served():
    async def use(engine: Any) -> None:
        app: Any = make_app(engine, ServerSettings())
        served = set(app.openapi()["paths"])
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = SERVER[name]["httpGet"]
            assert asked["path"] in served
            assert asked["port"] == SERVER["ports"][0]["name"]

    serve(use)
    # It is 503 until a program is compiled: nobody may take that for death.
    startup = SERVER["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800


def test_all_mean_the_same_pods():
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


def test_the_pool_is_what_the_inference_extension_takes():
    pool = POOLED["InferencePool"]
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    jsonschema.validate(pool["spec"], POOL)
    picker = pool["spec"]["endpointPickerRef"]
    assert picker.get("kind", "Service") != "Service" or "port" in picker
    for wrong in ({"targetPort": 8000}, {"targetPorts": []}, {"selector": {}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(pool["spec"] | wrong, POOL)


@pytest.mark.parametrize("kind", REPLICAS)
def test_kubernetes_takes_the_replicas(kind: str):
    schemas = pytest.importorskip("kubernetes_validate")
    schemas.validate(REPLICAS[kind], "1.31", strict=True)
    wrong = REPLICAS[kind] | {"specs": {}}
    with pytest.raises(schemas.ValidationError):
        schemas.validate(wrong, "1.31", strict=True)


def test_the_linter_of_dockerfiles_has_no_complaints():
    linter = shutil.which("hadolint")
    if linter is None:
        pytest.skip("no hadolint here")
    command = [linter, "--failure-threshold", "warning", DEPLOY / "Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
