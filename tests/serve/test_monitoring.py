"""The files for Prometheus and Grafana, checked with promtool and a real scrape."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.support.serving import COMPLETIONS, PROMPT, post, serve_http

FOLDER = Path(__file__).parents[2] / "benchmarks" / "monitoring"
GRAFANA = FOLDER / "grafana"
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


def promtool(*arguments: str, stdin: str | None = None) -> tuple[int, str]:
    """Run promtool; return its exit status and output."""
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments], input=stdin, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def scrape() -> str:
    """Return the metrics of a server after some requests, one of them invalid."""
    texts: list[str] = []

    async def ask(client: httpx.AsyncClient) -> None:
        for _ in range(3):
            await post(client, COMPLETIONS, prompt=PROMPT * 4, max_tokens=12)
        assert (await client.post(COMPLETIONS, json={})).status_code == 400
        texts.append((await client.get("/metrics")).text)

    serve_http(ask)
    return texts[0]


def samples_of(scrape: str) -> list[Sample]:
    families = text_string_to_metric_families(scrape)
    return [sample for family in families for sample in family.samples]


def dashboard() -> dict[str, Any]:
    return json.loads((GRAFANA / "dashboards" / "jaxspec.json").read_text())


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[str]:
    """Return all expressions of panels and rules, with Grafana's variables replaced."""
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    found = [
        one.replace("$__rate_interval", "1m").replace("$model_name", ".*")
        for one in found
    ]
    assert not [one for one in found if "$" in one]
    return found + [rule["expr"] for rule in rules() if "record" in rule]


def check_rules(folder: Path, series: dict[str, str], **checks: Any) -> None:
    """Let Prometheus evaluate expressions on series of twenty minutes."""
    test = {
        "interval": f"{SCRAPE_S}s",
        "input_series": [
            {"series": name, "values": values} for name, values in series.items()
        ],
    }
    whole = {"rule_files": [str(FOLDER / "rules.yml")], "tests": [test | checks]}
    path = folder / "test.yml"
    path.write_text(json.dumps(whole))
    status, output = promtool("test", "rules", str(path))
    assert status == 0, output


def series_of(scrape: str) -> dict[str, str]:
    """Make series that grow by the same amount between any two scrapes."""
    found: dict[str, str] = {}
    for sample in samples_of(scrape):
        labels = {"job": "jaxspec", "instance": "here"} | sample.labels
        pairs = ", ".join(f"{name}={json.dumps(text)}" for name, text in labels.items())
        grows = sample.name.endswith(("_total", "_bucket", "_count", "_sum"))
        start, step = (0.0, sample.value) if grows else (sample.value, 0.0)
        found[f"{sample.name}{{{pairs}}}"] = f"{start:.9f}+{step:.9f}x{FOREVER}"
    return found


@needs_promtool
def test_prometheus_accepts_configuration_and_rules():
    status, output = promtool("check", "config", str(FOLDER / "prometheus.yml"))
    assert (status, f"{len(rules())} rules found" in output) == (0, True), output


@needs_promtool
def test_prometheus_accepts_scrape(scrape: str):
    _, output = promtool("check", "metrics", stdin=scrape)
    assert output
    pattern = re.compile("|".join(COMPLAINTS))
    assert not [line for line in output.splitlines() if not pattern.fullmatch(line)]


@needs_promtool
def test_every_expression_yields_numbers(scrape: str, tmp_path: Path):
    # A result is empty if a name is wrong or labels do not match, and NaN is not >= 0.
    checks = [
        {
            "expr": f"count(({expression}) >= 0) > bool 0",
            "eval_time": "20m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        for expression in expressions()
    ]
    assert len(checks) > len(panels()) > 15
    check_rules(tmp_path, series_of(scrape), promql_expr_test=checks)


@needs_promtool
def test_recording_rule_values(scrape: str, tmp_path: Path):
    total = {
        sample.name.removesuffix("_total"): sample.value
        for sample in samples_of(scrape)
        if not sample.name.endswith(("_bucket", "_created"))
    }
    drafts = "vllm:spec_decode_num_draft"
    accepted = total["vllm:spec_decode_num_accepted_tokens"]
    by_position = {
        f'{{position="{sample.labels["position"]}"}}': sample.value
        for sample in samples_of(scrape)
        if sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    }
    values = {
        "model_name:generation_tokens:rate5m": total["vllm:generation_tokens"]
        / SCRAPE_S,
        "model_name:acceptance_rate:rate5m": accepted / total[f"{drafts}_tokens"],
        "model_name:mean_acceptance_length:rate5m": 1 + accepted / total[f"{drafts}s"],
    }
    for labels, count in by_position.items():
        name = f"model_name_position:acceptance_rate:rate5m{labels}"
        values[name] = count / total[f"{drafts}s"]
    agreed, compared = (
        total[f"jaxspec:speculation_drafts_{one}"] for one in ("agreed", "compared")
    )
    values["model_name:draft_agreement:rate5m"] = agreed / compared
    assert len(values) == 4 + 3
    checks = [
        {
            "expr": f"abs({name} - {value:.9f}) < bool 0.00001",
            "eval_time": "20m",
            "exp_samples": [
                {
                    "labels": f'{{model_name="target"{_position(name)}}}',
                    "value": 1,
                }
            ],
        }
        for name, value in values.items()
    ]
    check_rules(tmp_path, series_of(scrape), promql_expr_test=checks)


def _position(name: str) -> str:
    return "".join(f", {one}" for one in re.findall(r'position="\d"', name))


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
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    assert set(ALERTS) == set(alerts)
    for name, (series, summary) in ALERTS.items():
        is_of_model = "model_name" in next(iter(series))
        labels = {"model_name": "m"} if is_of_model else {"instance": "here"}
        if " by " not in alerts[name]["expr"] and not is_of_model:
            labels["job"] = "jaxspec"
        raised = {
            "exp_labels": labels | alerts[name].get("labels", {}),
            "exp_annotations": {"summary": summary},
        }
        check = {"eval_time": "20m", "alertname": name, "exp_alerts": [raised]}
        check_rules(tmp_path, series, alert_rule_test=[check])


@needs_promtool
def test_healthy_server_fires_no_alert(scrape: str, tmp_path: Path):
    series = series_of(scrape) | {f"up{{{SERVER}}}": "1+0x80"}
    checks = [
        {"eval_time": "20m", "alertname": name, "exp_alerts": []} for name in ALERTS
    ]
    check_rules(tmp_path, series, alert_rule_test=checks)


def test_expressions_use_existing_metrics(scrape: str):
    found = {sample.name for sample in samples_of(scrape)}
    asked = [*expressions(), *(rule["expr"] for rule in rules() if "alert" in rule)]
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    names = set(re.findall(r"\b(?:\w+:[\w:]+|http_\w+)", " ".join(asked)))
    assert names - found - recorded == set()
    own = {name for name in names if name.startswith("jaxspec:")}
    # If vLLM has a metric too, it is queried by vLLM's name, so the dashboard works for
    # vLLM as well.
    assert not {name.replace("jaxspec:", "vllm:") for name in own} & found


def test_panels_use_dashboard_variables():
    whole = dashboard()
    variables = {one["name"]: one for one in whole["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    for panel in panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= set(variables)


def test_grafana_provisioning():
    (provider,) = _read_yaml("grafana/dashboards/jaxspec.yml")["providers"]
    assert provider["options"]["path"] == "${GF_PATHS_PROVISIONING}/dashboards"
    (source,) = _read_yaml("grafana/datasources/prometheus.yml")["datasources"]
    services = _read_yaml("compose.yml")["services"]
    address = source["url"].replace("http://localhost", "127.0.0.1")
    assert f"--web.listen-address={address}" in services["prometheus"]["command"]
    (scraped,) = _read_yaml("prometheus.yml")["scrape_configs"]
    assert scraped["static_configs"] == [{"targets": ["localhost:8000"]}]
    for service in services.values():
        for volume in service["volumes"]:
            assert (FOLDER / volume.split(":")[0]).exists()


def _read_yaml(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())
