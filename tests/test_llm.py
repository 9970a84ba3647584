"""`LLM` with a fake engine; tests/e2e tests it with the real one."""

import sys
from types import SimpleNamespace
from typing import Any

import jaxtyping
import pytest

import jaxspec.engine.llm_engine
import jaxspec.llm
import jaxspec_checkpoints
from jaxspec.config.engine import EngineConfig
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.engine_lock import EngineLock
from jaxspec.engine.input_processor import Prepared
from jaxspec.engine.runner import Runner
from jaxspec.errors import ConfigError, RequestError
from jaxspec.llm import LLM
from jaxspec.outputs import CompletionOutput, RequestOutput
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from jaxspec.text.tokenizer import Tokenizer
from tests.support.fake_engines import make_fake_engine

TOKENIZER = Tokenizer.from_folder(jaxspec_checkpoints.bundled_target())


class Echo:
    """A fake engine: finishes the newest request first, with its prompt reversed."""

    def __init__(self, args: EngineArgs):
        self.args, self.lock, self.input_processor = args, EngineLock(), self
        defaults = {"temperature": 0.6, "max_tokens": 3}
        self.config = SimpleNamespace(generation_defaults=defaults)
        self.tokenizer = TOKENIZER
        self.params: dict[str, SamplingParams] = {}
        self.waiting: dict[str, Any] = {}
        self.prompts: list[Any] = []
        self.priorities: list[int] = []
        self.num_steps = 0
        self.announce: Any = None
        self.warmed_up: Any = None
        self.is_shut_down = False

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "Echo":
        return cls(args)

    def prepare(
        self, request_id: str, prompt: Any, params: Any, *, priority: int = 0
    ) -> Prepared:
        if prompt == "bad":
            raise RequestError("bad prompt")
        request: Any = (prompt, params, priority)
        return Prepared(request_id, [request])

    def add_prepared(self, prepared: Prepared) -> None:
        request: Any = prepared.requests[0]
        prompt, self.params[prepared.request_id], priority = request
        self.priorities.append(priority)
        self.waiting[prepared.request_id] = prompt
        self.prompts.append(prompt)

    def is_unfinished(self, request_id: str) -> bool:
        return request_id in self.waiting

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.waiting.pop(request_id, None)

    def announce_compiles(self, announce: Any) -> None:
        self.announce = announce

    def _compile(self, *names: str) -> None:
        for name in names:
            self.announce(f"Compiling {name}")
            self.announce("")

    def warm_up(self, prompt_tokens: int | None = None, params: Any = ()) -> None:
        self.warmed_up = prompt_tokens, list(params)
        self._compile("one", "two")

    def wait_for_programs(self) -> None:
        self._compile("three")

    def shutdown(self) -> None:
        self.is_shut_down = True

    def step(self) -> list[RequestOutput]:
        self.num_steps += 1
        request_id, prompt = self.waiting.popitem()
        if prompt == "interrupt":
            raise KeyboardInterrupt
        if prompt == "fail":
            raise ZeroDivisionError
        if prompt == "new shape":
            self._compile("4 sequences")
        if isinstance(prompt, dict):
            prompt = prompt.get("prompt") or prompt["prompt_token_ids"]
        text = prompt if isinstance(prompt, str) else "".join(map(chr, prompt))
        tokens = [ord(letter) for letter in text]
        completion = CompletionOutput(
            index=0, text=text[::-1], token_ids=tokens, finish_reason="length"
        )
        return [
            RequestOutput(
                request_id=request_id,
                prompt=text,
                prompt_token_ids=[2],
                outputs=[completion],
                finished=True,
            )
        ]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setattr(jaxspec.llm, "LLMEngine", Echo)
    return LLM(model="folder")


def engine_of(llm: LLM) -> Echo:
    engine: Any = llm.llm_engine
    return engine


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_outputs_are_in_the_order_of_prompts(llm: LLM):
    outputs = llm.generate(["ab", "cd", "ef"], use_tqdm=False)
    assert texts(outputs) == ["ba", "dc", "fe"]
    # A second call continues counting the request ids.
    assert texts(llm.generate("gh", use_tqdm=False)) == ["hg"]
    assert llm.generate([], use_tqdm=False) == []
    assert [int(name) for name in engine_of(llm).params] == [0, 1, 2, 3]


def test_one_or_several_sampling_params_are_accepted(llm: LLM):
    given = [SamplingParams(max_tokens=5), SamplingParams(max_tokens=6)]
    llm.generate(["a", "b"], given, use_tqdm=False)
    llm.generate(["a", "b"], given[0], use_tqdm=False)
    llm.generate("a", use_tqdm=False)
    used = list(engine_of(llm).params.values())
    assert [params.max_tokens for params in used] == [5, 6, 5, 5, 3]
    assert used[-1].temperature == 0.6
    assert {params.output_kind for params in used} == {RequestOutputKind.FINAL_ONLY}
    # The objects that the caller passed are unchanged.
    assert given[0].output_kind is RequestOutputKind.CUMULATIVE


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ([SamplingParams()], "got 1 for 2 prompts"),
        ([SamplingParams(), 3], r"sampling_params\[1\] must be SamplingParams, got 3"),
    ],
)
def test_bad_sampling_params_are_rejected(llm, params, allowed, monkeypatch):
    # Type checks are off, as for users: with them, jaxtyping would report the wrong
    # type first.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(RequestError, match=allowed):
        llm.generate(["a", "b"], params, use_tqdm=False)
    assert not engine_of(llm).waiting


def test_deprecated_prompt_token_ids_are_accepted(llm: LLM):
    with pytest.warns(DeprecationWarning, match="prompt_token_ids="):
        outputs = llm.generate(prompt_token_ids=[[97, 98], [99]], use_tqdm=False)
    assert texts(outputs) == ["ba", "c"]
    with pytest.warns(DeprecationWarning), pytest.raises(RequestError, match="2 and 1"):
        llm.generate(["a", "b"], prompt_token_ids=[97], use_tqdm=False)
    with pytest.raises(RequestError, match="prompts must be"):
        llm.generate(use_tqdm=False)


TURN = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "Well"}


def test_one_or_several_conversations_are_accepted(llm: LLM):
    opened = "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n"
    expected = {"prompt": opened, "prompt_token_ids": TOKENIZER.encode(opened)}
    assert texts(llm.chat([TURN], use_tqdm=False)) == [opened[::-1]]
    assert engine_of(llm).prompts == [expected]
    llm.chat([[TURN], [TURN]], use_tqdm=False)
    assert engine_of(llm).prompts == [expected] * 3
    llm.chat(
        [TURN, ANSWER],
        use_tqdm=False,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert engine_of(llm).prompts[-1]["prompt"] == f"{opened}Well"


def test_chat_uses_the_template_of_the_engine(monkeypatch: pytest.MonkeyPatch):
    def make_runner(config: EngineConfig) -> Runner:
        runner = object.__new__(Runner)
        runner.config, runner.memory = config, None
        runner.compiles_in_background = False
        return runner

    monkeypatch.setattr(jaxspec.engine.llm_engine, "make_runner", make_runner)
    monkeypatch.setattr(Runner, "skips_padding", False)
    llm = LLM("jaxspec/tiny-gemma2", chat_template="<bos>{{ messages[0].content }}")
    given = llm.get_tokenizer().apply_chat_template([TURN])
    assert given == TOKENIZER.encode("hi")
    with pytest.raises(ConfigError, match="No such file exists"):
        LLM("jaxspec/tiny-gemma2", chat_template="no/template")


def test_conversations_can_be_enqueued(llm: LLM):
    request_ids = llm.enqueue_chat([[TURN], [TURN, ANSWER, TURN]], priority=[2, 1])
    assert len(request_ids) == 2
    assert engine_of(llm).prompts[1]["prompt"].count("<start_of_turn>") == 4
    assert engine_of(llm).priorities == [2, 1]
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == request_ids


def test_options_reach_the_template_or_are_rejected(llm: LLM):
    llm.chat([TURN], use_tqdm=False, chat_template="<bos>{{ messages[0].content }}!")
    assert engine_of(llm).prompts[0]["prompt"] == "<bos>hi!"
    with pytest.raises(RequestError, match="tools"):
        llm.chat([TURN], use_tqdm=False, tools=[{}])
    prompts: Any = [TURN]
    for call in (llm.chat, llm.generate, llm.enqueue):
        with pytest.raises(NotImplementedError, match="lora_request"):
            call(prompts, lora_request="x")
    for name in ("encode", "embed"):
        with pytest.raises(NotImplementedError, match="support|pooling"):
            getattr(llm, name)(["a"])
    unknown: Any = {"chat_templat": "x"}
    with pytest.raises(TypeError, match=r"^chat\(\) got an unexp.* 'chat_templat'"):
        llm.chat([TURN], use_tqdm=False, **unknown)


@pytest.mark.usefixtures("llm")
def test_arguments_reach_the_engine():
    with LLM("folder", seed=3, max_model_len=64, speculative_model="draft") as llm:
        args = engine_of(llm).args
        assert not engine_of(llm).is_shut_down
    assert engine_of(llm).is_shut_down
    assert (args.model, args.seed, args.max_model_len) == ("folder", 3, 64)
    assert args.speculative_model == "draft"
    assert args.disable_log_stats
    again = LLM.from_engine_args(EngineArgs(model="folder", max_num_seqs=2))
    assert engine_of(again).args == EngineArgs(model="folder", max_num_seqs=2)
    with pytest.raises(ConfigError, match=r"max_seqs \(given 3\).*max_num_seqs"):
        LLM("folder", max_seqs=3)


def test_reset_of_running_requests_reaches_the_engine(llm: LLM):
    engine, _ = make_fake_engine()
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=9))
    engine.step()
    llm.llm_engine = engine
    assert not llm.reset_prefix_cache()
    assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


def test_each_prompt_gets_its_priority(llm: LLM):
    llm.generate(["a", "b"], use_tqdm=False, priority=[3, -1])
    llm.generate(["a"], use_tqdm=False)
    llm.chat([TURN], use_tqdm=False, priority=[7])
    llm.generate(["a", "b"], use_tqdm=False, priority=5)
    assert engine_of(llm).priorities == [3, -1, 0, 7, 5, 5]
    with pytest.raises(RequestError, match="an integer, or a list of 1"):
        llm.generate(["a"], use_tqdm=False, priority=True)
    with pytest.raises(RequestError, match="a list of 2, one per prompt"):
        llm.generate(["a", "b"], use_tqdm=False, priority=[1])


def test_enqueued_prompts_wait_for_their_own_call(llm: LLM):
    first = llm.enqueue(["ab", "cd"], SamplingParams(max_tokens=4))
    second = llm.enqueue("ef")
    assert [*first, *second] == ["0", "1", "2"]
    assert engine_of(llm).num_steps == 0
    # `generate`, called while other requests run, returns only its own outputs.
    assert texts(llm.generate(["gh"], use_tqdm=False)) == ["hg"]
    assert texts(llm.wait_for_completion(use_tqdm=False)) == ["ba", "dc", "fe"]
    assert llm.wait_for_completion(use_tqdm=False) == []
    num_steps = engine_of(llm).num_steps
    for call in (llm.enqueue, llm.generate):
        with pytest.raises(RequestError, match="bad prompt"):
            call(["a", "bad", "b"])
        assert not engine_of(llm).waiting
    assert engine_of(llm).num_steps == num_steps
    ids = llm.enqueue(["a", "b", "c"])
    llm.llm_engine.abort_request([ids[1]])
    with pytest.raises(RequestError, match=f"Requests {ids[1]} ended without an outpu"):
        llm.wait_for_completion(use_tqdm=False)
    # The other requests still get their outputs.
    assert texts(llm.wait_for_completion(use_tqdm=False)) == ["a", "c"]
    assert llm.wait_for_completion(use_tqdm=False) == []


def broken_bar(**_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("prompts", "error"),
    [
        (["a", "fail"], ZeroDivisionError),
        (["interrupt", "b"], KeyboardInterrupt),
        (["a", "bad", "b"], RequestError),
    ],
)
def test_failed_call_leaves_no_requests(llm: LLM, prompts: list[str], error: Any):
    with pytest.raises(error):
        llm.generate(prompts, use_tqdm=False)
    assert not engine_of(llm).waiting
    assert not llm._finished
    with pytest.raises(ZeroDivisionError):
        llm.generate(["a", "b"], use_tqdm=broken_bar)
    assert not engine_of(llm).waiting
    with pytest.raises(error):
        llm.enqueue(prompts)
        llm.wait_for_completion(use_tqdm=False)
    assert not engine_of(llm).waiting
    assert llm.wait_for_completion(use_tqdm=False) == []
    assert texts(llm.generate(["cd"], use_tqdm=False)) == ["dc"]


def test_progress_bar_names_programs_being_compiled(llm, capsys):
    llm.generate(["new shape"])
    shown = capsys.readouterr().err
    assert "Compiling 4 sequences" in shown
    assert shown.rstrip().rsplit("\r", 1)[-1].startswith("Processed prompts: 100%")
    assert " toks/s, output: " in shown
    assert engine_of(llm).announce is None
    llm.generate(["ab"], use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_all_programs_can_be_compiled_at_the_start(monkeypatch, capsys):
    monkeypatch.setattr(jaxspec.llm, "LLMEngine", Echo)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    llm = LLM("folder", warm_up=True)
    assert "Compiling two: 2 programs" in capsys.readouterr().err
    assert engine_of(llm).announce is None
    assert engine_of(llm).warmed_up == (None, [])
    params = SamplingParams(logprobs=2)
    llm.warm_up(7, params)
    assert engine_of(llm).warmed_up == (7, [params])
    capsys.readouterr()
    llm.wait_for_programs()
    assert "Compiling three: 1 program" in capsys.readouterr().err
    assert engine_of(llm).announce is None
