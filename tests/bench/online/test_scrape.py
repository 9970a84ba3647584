"""A server's /metrics: the one that ours writes, and others'."""

from jaxspec.bench.acceptance import Acceptance
from jaxspec.bench.online.scrape import Scrape, read_scrape
from jaxspec.engine.metrics import EngineMetrics
from tests.support.fake_engines import make_fake_engine, run_all

VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 2.0
"""


def test_engines_are_added_up():
    found = read_scrape(VLLM)
    assert found.num_compiles is None
    assert found.acceptance == Acceptance(
        num_drafts=15, num_draft_tokens=30, num_accepted=12, per_position=(8, 4)
    )


def test_without_drafts_there_is_no_acceptance():
    assert read_scrape("") == Scrape()
    other = "# TYPE http_requests_total counter\nhttp_requests_total 3.0\n"
    assert read_scrape(other) == Scrape()


def test_names_are_those_that_our_engine_tells():
    engine, _ = make_fake_engine(num_draft_tokens=3)
    assert isinstance(engine.metrics, EngineMetrics)
    names = {metric.name for metric in engine.get_metrics()}
    told = {line.split()[2] for line in VLLM.splitlines() if line.startswith("# TYPE")}
    told = {name.removesuffix("_total") for name in told if "created" not in name}
    assert told <= names
    assert {"jaxspec:num_compiles", "jaxspec:warming"} <= names
    assert "jaxspec:synthetic_acceptance_info" not in names
    assert not run_all(engine)


def test_programs_that_are_still_to_be_made():
    text = '# TYPE jaxspec:warming gauge\njaxspec:warming{engine="0"} 3.0\n'
    assert read_scrape(text).num_warming == 3
    assert read_scrape(VLLM).num_warming == 0


def test_acceptance_that_is_forced_is_read_from_our_engines_words():
    engine, _ = make_fake_engine(num_draft_tokens=3, forced_acceptance=0.8)
    (info,) = [one for one in engine.get_metrics() if "synthetic" in one.name]
    labels = ",".join(f'{name}="{value}"' for name, value in info.labels.items())
    text = f"# TYPE {info.name} gauge\n{info.name}{{{labels}}} 1.0\n"
    assert read_scrape(text).forced_acceptance == (0.8, 0.8, 0.8)
    assert read_scrape(VLLM).forced_acceptance is None
