"""What the offline subcommands share: checks before loading, modes, sampling."""

import json

import pytest

from jaxspec.bench import offline as module
from jaxspec.bench import spec
from jaxspec.bench.offline import open_offline, sampling
from jaxspec.config.engine import EngineConfig
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.errors import ConfigError, RequestError
from jaxspec.sampling_params import RequestOutputKind
from jaxspec.text.tokenizer import Tokenizer
from tests.bench.workloads import flags, use_fake_engine
from tests.support.fake_engines import make_fake_engine

TARGET = ("--model", "jaxspec/tiny-gemma2")
FORCED = json.dumps(
    {
        "model": "jaxspec/tiny-gemma2-draft",
        "num_speculative_tokens": 2,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2,
    }
)


@pytest.fixture
def loaded(monkeypatch) -> list[tuple[EngineConfig, Tokenizer]]:
    """What engines would have been loaded with."""
    given: list[tuple[EngineConfig, Tokenizer]] = []

    def load(config: EngineConfig, *, tokenizer: Tokenizer) -> LLMEngine:
        given.append((config, tokenizer))
        return make_fake_engine()[0]

    monkeypatch.setattr(module, "LLMEngine", load)
    return given


def test_the_bundled_pair_gets_prompts_and_a_batch(loaded):
    prompts = open_offline(flags("latency"), num_prompts=10, num_seqs=10).prompts
    ((config, tokenizer),) = loaded
    assert config.max_num_seqs == 10
    assert config.num_draft_tokens == 5
    assert len(prompts) == 10
    # Questions are asked as turns, and all prompts begin a sequence.
    assert tokenizer.decode(prompts[0], skip_special_tokens=False).startswith(
        "<bos><start_of_turn>user\nA farmer"
    )
    assert {tokens[0] for tokens in prompts} == {tokenizer.bos_token_id}


def test_acceptance_is_forced_for_every_draft(loaded):
    options = flags("latency", "--forced-acceptance", 0.8)
    open_offline(options, num_prompts=1, num_seqs=1)
    ((config, _),) = loaded
    assert config.speculative.forced_acceptance == pytest.approx((0.8,) * 5)


def test_random_prompts_have_exactly_the_length(loaded):
    options = flags("latency", "--dataset-name", "random", "--input-len", 40)
    made = open_offline(options, num_prompts=3, num_seqs=None)
    assert [len(tokens) for tokens in made.prompts] == [40] * 3


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (("--num-iters", 0), ConfigError, "--num-iters must be"),
        (("--output-len", 0), ConfigError, "--output-len must be"),
        (("--num-iters-warmup", -1), ConfigError, "--num-iters-warmup must be"),
        (("--top-p", 2), RequestError, "top_p must be"),
        (("--max-num-seqs", 1), ConfigError, "--max-num-seqs must be at least 2"),
        (("--output-len", 8190), RequestError, "more than max_model_len=8192"),
        (("--forced-acceptance", 1.5), ConfigError, "--forced-acceptance must be a"),
        (
            ("--forced-acceptance", 0.5, *TARGET, "--speculative-config", FORCED),
            ConfigError,
            "forced twice",
        ),
        (
            ("--forced-acceptance", 0.5, *TARGET),
            ConfigError,
            "--forced-acceptance is for drafts",
        ),
    ],
)
def test_nothing_is_loaded_for_what_cannot_work(arguments, error, said, loaded):
    with pytest.raises(error, match=said):
        open_offline(flags("latency", *arguments), num_prompts=2, num_seqs=2)
    assert not loaded


def test_requests_follow_the_flags():
    options = flags("latency", "--temperature", 0.5, "--top-k", 4, "--output-len", 9)
    params = sampling(options, 2)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 4, 9)
    assert params.ignore_eos
    assert params.detokenize
    assert params.output_kind is RequestOutputKind.DELTA
    assert params.extra_args == {"num_speculative_tokens": 2}
    changed = sampling(options, 0, is_streamed=False, temperature=0.0)
    assert changed.temperature == 0
    assert changed.output_kind is RequestOutputKind.FINAL_ONLY
    quiet = flags("latency", "--disable-detokenize", "--no-ignore-eos")
    assert not sampling(quiet, 0).detokenize
    assert not sampling(quiet, 0).ignore_eos


def test_modes_are_plain_and_with_drafts(monkeypatch):
    use_fake_engine(monkeypatch)
    made = spec.open_offline(flags("latency"), num_prompts=3, num_seqs=3)
    assert made.modes() == {"plain": 0, "speculative": 3}
    batch = made.batch(2, 2, temperature=0.0)
    assert len(batch.prompts) == len(batch.params) == 2
    assert batch.params[0].extra_args == {"num_speculative_tokens": 2}
    use_fake_engine(monkeypatch, num_draft_tokens=0)
    made = spec.open_offline(flags("latency"), num_prompts=3, num_seqs=3)
    assert made.modes() == {"plain": 0}
