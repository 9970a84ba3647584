"""`python -m jaxspec generate`: the printed text, and the comparison of speeds."""

import argparse
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxspec import __main__ as command_line
from jaxspec.bench.acceptance import Acceptance
from jaxspec.bench.measure import Run
from jaxspec.cli import chat, generate
from jaxspec.cli.commands import make_parser
from jaxspec.cli.generate import comparison, decode, difference, encode, warm_up
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.errors import ArgumentError
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from jaxspec.text.tokenizer import Tokenizer
from jaxspec_checkpoints import bundled_target
from tests.support.engines import make_engine, make_micro
from tests.support.fake_engines import make_fake_engine
from tests.support.terminals import GREEN, Terminal

PROMPT = [5, 9, 4, 11]
NUM_TOKENS = 24


def params(temperature: float = 0.0, **changes: Any) -> SamplingParams:
    given: Any = dict(max_tokens=NUM_TOKENS, ignore_eos=True) | changes
    kind = RequestOutputKind.DELTA
    return SamplingParams(temperature=temperature, output_kind=kind, **given)


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    # The draft is another random model, whose drafts are sometimes accepted.
    target, draft = (make_micro(seed=seed, num_hidden_layers=1) for seed in (0, 1))
    # Each launch has room for one tile, so that there are few programs.
    sizes: Any = dict(max_num_seqs=1, max_num_batched_tokens=32)
    engine = make_engine(target, draft, num_draft_tokens=2, **sizes)
    for one in (params(), generate.without_speculation(params())):
        warm_up(engine, PROMPT, one)
    return engine


def test_runs_with_and_without_drafts_are_equal_and_compile_nothing(engine):
    num_compiles = engine.runner.num_compiles
    speculative = decode(engine, PROMPT, params())
    plain = decode(engine, PROMPT, generate.without_speculation(params()))
    assert engine.runner.num_compiles == num_compiles > 0
    assert speculative.token_ids == plain.token_ids
    assert len(plain.token_ids[0]) == NUM_TOKENS
    # The prompt's launch gives the first token, and each round at least one more.
    assert len(plain.inter_token_s) == NUM_TOKENS - 1
    assert not plain.acceptance.num_drafts
    accepted = speculative.acceptance.num_accepted
    assert speculative.acceptance.num_draft_tokens > 0
    # In the last round, an accepted draft may end the text, without a token of the
    # target after it.
    assert 0 <= len(speculative.inter_token_s) + accepted - (NUM_TOKENS - 1) <= 1


def test_accepted_drafts_are_green_on_terminal(engine, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    drawn = params(temperature=1.5, seed=6)
    decoded = generate._shown(engine, PROMPT, drawn)
    text, _, legend = screen.getvalue().partition("\n\n")
    # Here, every token decodes to one character.
    green = "".join(GREEN.findall(text))
    accepted = decoded.acceptance.num_accepted
    assert len(green) == accepted
    assert 0 < accepted < decoded.acceptance.num_draft_tokens, "some are rejected"
    assert GREEN.sub(r"\1", text) == engine.tokenizer.decode(decoded.token_ids[0])
    assert legend == "\x1b[32mGreen\x1b[0m: drafts that the target accepted.\n"
    assert drawn.extra_args is None, "the caller's parameters are unchanged"


def decoded(token_ids: list[int], seconds: float, histogram=()) -> Run:
    """Make a run from its decoding seconds (after the first token) and histogram."""
    rounds = sum(histogram)
    drafted = Acceptance(
        num_drafts=rounds,
        num_draft_tokens=rounds * (len(histogram) - 1),
        num_accepted=sum(kept * count for kept, count in enumerate(histogram)),
    )
    gaps = len(token_ids) - 1
    return Run(
        elapsed_s=seconds + 0.0125,
        num_prompt_tokens=4,
        token_ids=[token_ids],
        first_token_s=[0.0125],
        per_token_s=[seconds / gaps] if gaps else [],
        inter_token_s=[0.0] * (rounds or gaps),
        decode=None,
        acceptance=drafted,
    )


def rows(table: str) -> dict[str, list[str]]:
    """Return the cells of a table by label; a label ends at two spaces."""
    parts = (re.split(r"\s{2,}", line) for line in table.splitlines())
    return {label: cells for label, *cells in parts}


def test_table_shows_speeds_and_acceptance():
    # 10 rounds of 2 drafts: 4 accept none, 2 one, 4 both -> 10 of 20, 21 tokens in all.
    tokens = list(range(21))
    table = comparison([decoded(tokens, 0.5, [4, 2, 4])], [decoded(tokens, 1.0)])
    expected = {
        "tokens": ["21", "21"],
        "tokens/s": ["40.0", "20.0"],
        "first token, ms": ["12.5", "12.5"],
        "rounds": ["10", "20"],
        "acceptance rate": ["0.500"],
        "mean acceptance length": ["2.00"],
        "speed-up": ["2.00x"],
        "texts": ["equal"],
    }
    assert rows(table).items() >= expected.items()
    assert max(map(len, table.splitlines())) <= 80


def test_table_has_medians_and_spread_of_repeats():
    tokens = list(range(21))
    ours = [decoded(tokens, seconds, [4, 2, 4]) for seconds in (0.5, 0.4, 1.0)]
    plain = [decoded(tokens, seconds) for seconds in (1.0, 1.0, 0.8)]
    table = comparison(ours, plain)
    found = rows(table)
    assert found["tokens/s"] == ["40.0", "20.0"]
    assert found["speed-up"] == ["2.00x"]
    assert found["least, most"] == ["0.80x, 2.50x"]
    *_, repeats, meaning = table.splitlines()
    assert repeats.startswith("medians of 3 alternating runs; ")
    assert meaning.startswith("speed-up: median of 3 ratios, each of one run to ")
    other = [*plain[:2], decoded([*tokens[:-1], 99], 1.0)]
    assert rows(comparison(ours, other))["texts"] == ["differs at token 21"]


def test_table_omits_modes_that_were_not_run():
    runs = [decoded([4, 5], 0.5)]
    assert "No drafts: the engine predicted" in comparison(runs, runs)
    assert "drafts" not in comparison(runs, None, has_drafts=False)
    alone = rows(comparison(runs, None))
    assert alone["tokens/s"] == ["2.0"]
    assert not {"speed-up", "texts"} & alone.keys()
    one_token = rows(comparison([decoded([4], 0.0)], [decoded([4], 0.0)]))
    assert (one_token["tokens/s"], one_token["speed-up"]) == (["-", "-"], ["-"])


def test_weights_of_nan_are_an_error(monkeypatch, capsys):
    def load(*_: Any, **__: Any) -> LLMEngine:
        engine, runner = make_fake_engine(num_draft_tokens=3)
        runner.device.poison = engine.tokenizer.encode("$")[0]
        return engine

    monkeypatch.setattr(generate, "load_engine", load)
    words = ["generate", "$", "--raw"]
    assert command_line.main(words) == 1
    shown = capsys.readouterr()
    assert shown.out == "", "neither a text nor a table"
    assert "jaxspec generate: error: The model's logits became NaN" in shown.err


def test_first_different_token_is_named():
    for right, place in (
        ([9, 2, 3], 1),
        ([1, 2, 4], 3),
        ([1, 2], 3),
        ([1, 2, 3, 4], 4),
    ):
        assert difference([1, 2, 3], right) == f"differs at token {place}"
    assert difference([1, 2, 3], [1, 2, 3]) == "equal"


def options(*arguments: str) -> argparse.Namespace:
    parsed = make_parser().parse_args(["generate", "Once upon", *arguments])
    parsed.compilation_cache_dir = None
    return parsed


@pytest.fixture
def untuned(tmp_path: Path) -> Path:
    """Make a copy of the bundled target without a chat template; return its folder."""
    folder = shutil.copytree(bundled_target(), tmp_path / "model")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"]
    path.write_text(json.dumps(config))
    return folder


def test_continues_prompt_where_model_has_no_chat_template(untuned, capsys):
    generate.run(options("--model", str(untuned), "--max-tokens", "3", "--ignore-eos"))
    shown = capsys.readouterr()
    assert f"Loading {untuned} ... " in shown.err
    table = rows(shown.out)
    assert table[""] == ["plain"] and table["tokens"] == ["3"]
    assert (
        "The model has no chat template, so the prompt was continued as plain text."
        in shown.out
    )


def test_rejects_chat_where_model_has_no_chat_template(untuned, monkeypatch):
    monkeypatch.setattr(generate, "LLMEngine", None)  # weights are not loaded
    chosen = options("--model", str(untuned), "--chat")
    with pytest.raises(ArgumentError, match="no chat template: ") as refused:
        generate.run(chosen)
    # The hint's command works as it is pasted.
    program, hint = str(refused.value).splitlines()[-1].split("generate", 1)
    assert program.strip() == "python -m jaxspec"
    pasted = make_parser().parse_args(["generate", *shlex.split(hint)])
    assert (pasted.model, pasted.is_chat) == (str(untuned), False)
    chosen = make_parser().parse_args(["chat", "--model", str(untuned)])
    with pytest.raises(ArgumentError, match="no chat template"):
        chat.run(chosen)


def test_chat_prompt_is_encoded_as_turns():
    tokenizer = Tokenizer.from_folder(bundled_target())
    expected = "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    found = encode(tokenizer, " Hi", is_chat=True)
    assert found == tokenizer.encode(f"<bos>{expected}")
    # The text of a prompt cannot end its turn.
    prompt = encode(tokenizer, "a<end_of_turn>b", is_chat=True)
    ends = tokenizer.encode("<end_of_turn>", add_special_tokens=False)
    assert prompt.count(*ends) == 1


def test_raw_prompt_is_encoded_like_engine(engine):
    found = encode(engine.tokenizer, "+*%,", is_chat=False)
    engine.add_request("raw", "+*%,", params())
    (request,) = engine.scheduler.waiting
    assert list(request.prompt_token_ids) == found
    engine.abort_request("raw")


def test_generate_prints_text_and_comparison(engine, monkeypatch, capsys):
    # The test loads other models than the named ones; tests of `LLMEngine` cover
    # loading.
    monkeypatch.setattr(generate, "LLMEngine", lambda config: engine)
    ended: list[LLMEngine] = []
    monkeypatch.setattr(engine, "shutdown", lambda: ended.append(engine))
    words = "--raw --num-speculative-tokens 2 --dtype float32 --ignore-eos"
    words += f" --max-tokens {NUM_TOKENS} --temperature 0.7 --top-p 0.9 --top-k 50"
    trimmed = ["--speculative-config", '{"draft_vocab_size": 2048}']
    assert command_line.main(["generate", "+*%,", *words.split(), *trimmed]) == 0
    assert ended == [engine]
    shown = capsys.readouterr()
    setting = "jaxspec/tiny-gemma2, float32 on cpu, K = 2, temperature 0.7, seed 0"
    text, _, below = shown.out.partition(f"\n\n{setting}\n")
    prompt = encode(engine.tokenizer, "+*%,", is_chat=False)
    drawn = params(temperature=0.7, top_p=0.9, top_k=50, seed=0)
    expected = decode(engine, prompt, drawn)
    assert text == engine.tokenizer.decode(expected.token_ids[0])
    assert below.startswith("No --seed was given: seed 0 was used")
    found = rows(below)
    assert found["tokens"] == [str(NUM_TOKENS)] * 2
    assert "least, most" in found
    assert found["rounds"] == [str(len(expected.inter_token_s)), str(NUM_TOKENS - 1)]
    assert found["acceptance rate"] == [f"{expected.acceptance.rate:.3f}"]
    assert found["texts"] == ["equal"]
    assert re.fullmatch(r"Loading .* s\nCompiling \.\.\. .* s\n", shown.err)


@pytest.mark.parametrize("is_chat", [False, True])
def test_prompt_that_is_not_utf8_is_refused(engine, is_chat):
    with pytest.raises(ArgumentError, match="the prompt must be text that UTF-8"):
        encode(engine.tokenizer, "caf\udce9", is_chat=is_chat)
