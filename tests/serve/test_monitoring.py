"""The files for Prometheus and Grafana, checked with promtool and a real scrape."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.support.serving import COMPLETIONS, PROMPT, server

FOLDER = Path(__file__).parents[2] / "benchmarks" / "monitoring"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian package prometheus)"
)
# promtool complains about these names of metrics, which are vLLM's.
COMPLAINTS = (
    r"(vllm|jaxspec):\w+ metric names should not contain ':'",
    r'(vllm|jaxspec):iteration_tokens_total non-counter .* "_total" suffix',
)
SCRAPE_S = 15
FOREVER = 80  # number of scrapes: twenty minutes


def read_yaml(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


DASHBOARD = json.loads((FOLDER / "grafana" / "dashboards" / "jaxspec.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [one for group in read_yaml("rules.yml")["groups"] for one in group["rules"]]
ALERT_RULES = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
# All expressions of panels and rules, with Grafana's variables replaced.
EXPRESSIONS = [
    target["expr"].replace("$__rate_interval", "1m").replace("$model_name", ".*")
    for panel in PANELS
    for target in panel["targets"]
] + list(RECORDED.values())


@pytest.fixture(scope="module")
def scrape() -> str:
    """Return the metrics of a server after some requests, one of them invalid."""
    with server() as http:
        for _ in range(3):
            http.ask(COMPLETIONS, prompt=PROMPT * 4, max_tokens=12)
        http.refusal(COMPLETIONS, {})
        return http.get("/metrics").text


@pytest.fixture(scope="module")
def samples(scrape: str) -> list[Sample]:
    families = text_string_to_metric_families(scrape)
    return [sample for family in families for sample in family.samples]


@pytest.fixture(scope="module")
def series(samples: list[Sample]) -> dict[str, str]:
    """Make series that grow by the same amount between any two scrapes."""
    found: dict[str, str] = {}
    for sample in samples:
        labels = {"job": "jaxspec", "instance": "here"} | sample.labels
        pairs = ", ".join(f"{name}={json.dumps(text)}" for name, text in labels.items())
        grows = sample.name.endswith(("_total", "_bucket", "_count", "_sum"))
        start, step = (0.0, sample.value) if grows else (sample.value, 0.0)
        found[f"{sample.name}{{{pairs}}}"] = f"{start:.9f}+{step:.9f}x{FOREVER}"
    return found


def promtool(*arguments: str, stdin: str | None = None) -> tuple[int, str]:
    """Run promtool; return its exit status and output."""
    words: Any = [PROMTOOL, *arguments]
    done = subprocess.run(words, input=stdin, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def check_rules(folder: Path, series: dict[str, str], **checks: Any) -> None:
    """Let Prometheus evaluate expressions on series of twenty minutes."""
    given = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": f"{SCRAPE_S}s", "input_series": given} | checks
    path = folder / "test.yml"
    whole = {"rule_files": [str(FOLDER / "rules.yml")], "tests": [test]}
    path.write_text(json.dumps(whole))
    status, output = promtool("test", "rules", str(path))
    assert status == 0, output


def is_true(condition: str, labels: str = "{}") -> dict[str, Any]:
    expected = [{"labels": labels, "value": 1}]
    return {"expr": condition, "eval_time": "20m", "exp_samples": expected}


@needs_promtool
def test_prometheus_accepts_configuration_and_rules():
    status, output = promtool("check", "config", str(FOLDER / "prometheus.yml"))
    assert (status, f"{len(RULES)} rules found" in output) == (0, True), output


@needs_promtool
def test_prometheus_accepts_scrape(scrape: str):
    _, output = promtool("check", "metrics", stdin=scrape)
    assert output
    pattern = re.compile("|".join(COMPLAINTS))
    assert not [line for line in output.splitlines() if not pattern.fullmatch(line)]


@needs_promtool
def test_every_expression_yields_numbers(series: dict[str, str], tmp_path: Path):
    # A result is empty if a name is wrong or labels do not match, and NaN is not >= 0.
    assert not [one for one in EXPRESSIONS if "$" in one]
    checks = [is_true(f"count(({one}) >= 0) > bool 0") for one in EXPRESSIONS]
    assert len(checks) > len(PANELS) > 15
    check_rules(tmp_path, series, promql_expr_test=checks)


@needs_promtool
def test_recording_rules_equal_values_of_metrics(
    samples: list[Sample], series: dict[str, str], tmp_path: Path
):
    total = {
        sample.name.removesuffix("_total"): sample.value
        for sample in samples
        if not sample.name.endswith(("_bucket", "_created"))
    }
    drafts, speculation = "vllm:spec_decode_num_", "jaxspec:speculation_drafts_"
    accepted, rounds = total[f"{drafts}accepted_tokens"], total[f"{drafts}drafts"]
    values = {
        "generation_tokens:rate5m": total["vllm:generation_tokens"] / SCRAPE_S,
        "acceptance_rate:rate5m": accepted / total[f"{drafts}draft_tokens"],
        "mean_acceptance_length:rate5m": 1 + accepted / rounds,
        "draft_agreement:rate5m": total[f"{speculation}agreed"]
        / total[f"{speculation}compared"],
    }
    values = {(f"model_name:{name}", ""): value for name, value in values.items()}
    for sample in samples:
        if sample.name == f"{drafts}accepted_tokens_per_pos_total":
            place = f'position="{sample.labels["position"]}"'
            name = f"model_name_position:acceptance_rate:rate5m{{{place}}}"
            values[name, f", {place}"] = sample.value / rounds
    assert len(values) == 4 + 3
    checks = [
        is_true(
            f"abs({name} - {value:.9f}) < bool 0.00001",
            f'{{model_name="target"{place}}}',
        )
        for (name, place), value in values.items()
    ]
    check_rules(tmp_path, series, promql_expr_test=checks)


SERVER = 'job="jaxspec", instance="here"'
ALERTS = {
    "ServerDown": ({f"up{{{SERVER}}}": "0+0x80"}, "here does not answer"),
    "RequestsFail": (
        {f'http_requests_total{{{SERVER}, status="5xx"}}': "0+30x80"},
        "here fails or refuses 2 requests/s",
    ),
    "DraftsAreRejected": (
        {
            'jaxspec:speculation_drafts_agreed_total{model_name="m"}': "0+5.8x80",
            'jaxspec:speculation_drafts_compared_total{model_name="m"}': "0+20x80",
        },
        "m agrees with 29% of its drafts: look for a wrong chat template, a draft "
        "model of another family or fine-tune, a high temperature",
    ),
    "CompilesWhileServing": (
        {f"jaxspec:num_compiles_total{{{SERVER}}}": "5+0x60 6+0x20"},
        "here compiled while requests waited: see --warm-up",
    ),
}


@needs_promtool
def test_every_alert_fires(tmp_path: Path):
    assert set(ALERTS) == set(ALERT_RULES)
    for name, (series, summary) in ALERTS.items():
        is_of_model = "model_name" in next(iter(series))
        labels = {"model_name": "m"} if is_of_model else {"instance": "here"}
        if " by " not in ALERT_RULES[name]["expr"] and not is_of_model:
            labels["job"] = "jaxspec"
        raised = {
            "exp_labels": labels | ALERT_RULES[name].get("labels", {}),
            "exp_annotations": {"summary": summary},
        }
        check = {"eval_time": "20m", "alertname": name, "exp_alerts": [raised]}
        check_rules(tmp_path, series, alert_rule_test=[check])


@needs_promtool
def test_healthy_server_fires_no_alert(series: dict[str, str], tmp_path: Path):
    checks = [
        {"eval_time": "20m", "alertname": name, "exp_alerts": []} for name in ALERTS
    ]
    up = {f"up{{{SERVER}}}": "1+0x80"}
    check_rules(tmp_path, series | up, alert_rule_test=checks)


def test_expressions_use_existing_metrics(samples: list[Sample]):
    found = {sample.name for sample in samples}
    asked = [*EXPRESSIONS, *(rule["expr"] for rule in ALERT_RULES.values())]
    names = set(re.findall(r"\b(?:\w+:[\w:]+|http_\w+)", " ".join(asked)))
    assert names - found - RECORDED.keys() == set()
    own = {name for name in names if name.startswith("jaxspec:")}
    # If vLLM has a metric too, it is queried by vLLM's name, so the dashboard works for
    # vLLM as well.
    assert not {name.replace("jaxspec:", "vllm:") for name in own} & found


def test_panels_use_dashboard_variables():
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= set(variables)


def test_monitoring_services_name_existing_files():
    (provider,) = read_yaml("grafana/dashboards/jaxspec.yml")["providers"]
    assert provider["options"]["path"] == "${GF_PATHS_PROVISIONING}/dashboards"
    (source,) = read_yaml("grafana/datasources/prometheus.yml")["datasources"]
    services = read_yaml("compose.yml")["services"]
    address = source["url"].replace("http://localhost", "127.0.0.1")
    assert f"--web.listen-address={address}" in services["prometheus"]["command"]
    (scraped,) = read_yaml("prometheus.yml")["scrape_configs"]
    assert scraped["static_configs"] == [{"targets": ["localhost:8000"]}]
    for service in services.values():
        for volume in service["volumes"]:
            assert (FOLDER / volume.split(":")[0]).exists()
