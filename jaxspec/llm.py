"""Owns `LLM`, the offline interface: a list of prompts in, a list of outputs out.

Only hands requests to the engine and collects what comes back, in the order of the
prompts. Knows nothing about scheduling or devices.
"""

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tqdm.auto import tqdm

from jaxspec.chat_template import given_template
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.errors import RequestError, UnsupportedError, wrong_argument
from jaxspec.inputs import PromptType, TokensPrompt, split_prompts
from jaxspec.outputs import RequestOutput
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from jaxspec.tokenizer import Tokenizer

Message = Mapping[str, Any]


class LLM:
    """A target model, optionally with a draft model, that continues texts.

    Usable as a context manager; leaving it frees the device memory.

    Attributes:
        llm_engine: The engine, for adding requests and stepping by hand.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        dtype: str = "auto",
        seed: int | None = 0,
        tensor_parallel_size: int = 1,
        disable_log_stats: bool = True,
        **engine_arguments: Any,
    ):
        """Load the models; `engine_arguments` are the other fields of `EngineArgs`.

        Raises:
            ConfigError: An argument cannot work, or there is none of that name.
            NotImplementedError: An argument asks for what the engine does not do.
        """
        args = EngineArgs(
            model=model,
            tokenizer=tokenizer,
            dtype=dtype,
            seed=seed,
            tensor_parallel_size=tensor_parallel_size,
            disable_log_stats=disable_log_stats,
            **engine_arguments,
        )
        self.llm_engine = LLMEngine.from_engine_args(args)
        self._request_ids = map(str, itertools.count())

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLM":
        return cls(**vars(engine_args))

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.llm_engine.shutdown()

    def get_tokenizer(self) -> Tokenizer:
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return vLLM's defaults, changed by the model's generation_config.json."""
        return SamplingParams(**self.llm_engine.config.generation_defaults)

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; outputs come in the order of the prompts.

        Every request is checked before the first one runs.

        Args:
            prompts: One prompt or a list: strings, token ids or dicts.
            sampling_params: One for all prompts, or one each; None for
                `get_default_sampling_params()`.
            use_tqdm: Show a progress bar; or what makes one in place of `tqdm`.
            prompt_token_ids: The older way to give token ids.
            lora_request: Not supported.
            priority: Not supported; requests run first come, first served.

        Raises:
            RequestError: A prompt or its parameters cannot work; nothing was run.
            NotImplementedError: A parameter asks for what the engine does not do.
        """
        _refuse("lora_request", lora_request)
        _refuse("priority", priority if any(priority or ()) else None)
        prompt_list = _join_token_ids(prompts, prompt_token_ids)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params_list = _one_per_prompt(sampling_params, len(prompt_list))
        request_ids: list[str] = []
        try:
            for prompt, params in zip(prompt_list, params_list, strict=True):
                request_id = next(self._request_ids)
                self.llm_engine.add_request(request_id, prompt, params)
                request_ids.append(request_id)
            return self._run(request_ids, use_tqdm)
        except BaseException:
            # Also when the user interrupts: the next call must find an idle engine.
            self.llm_engine.abort_request(request_ids)
            raise

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        parse_special_tokens: bool = False,
        tools: Any = None,
        lora_request: Any = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them.

        Args:
            messages: Dicts with `role` and `content`; user and assistant take turns.
            sampling_params: As for `generate`.
            use_tqdm: As for `generate`.
            add_generation_prompt: Open the model's turn.
            continue_final_message: Let the model go on with the last message.
            chat_template: Used in place of the model's: a Jinja template, or the path
                of a file with one.
            parse_special_tokens: Let special pieces spelled in messages count. Without
                it "<end_of_turn>" in a message is text and cannot end its turn.
            tools: Not supported.
            lora_request: Not supported.

        Raises:
            RequestError: The roles do not take turns, or as for `generate`.
            ConfigError: `chat_template` cannot be used.
        """
        _refuse("tools", tools)
        tokenizer = self.get_tokenizer()
        template = None if chat_template is None else given_template(chat_template)
        if not isinstance(messages, (list, tuple)):
            allowed = "a conversation (a list of messages) or a list of them"
            raise wrong_argument(RequestError, "messages", allowed, messages)
        conversations: list[Any] = list(messages)
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        prompts: list[TokensPrompt] = []
        for conversation in conversations:
            text, token_ids = tokenizer.write_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=template,
                parse_special_tokens=parse_special_tokens,
            )
            # The ids decide: in the text a message may spell a turn marker.
            prompts.append({"prompt": text, "prompt_token_ids": token_ids})
        return self.generate(
            prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request
        )

    def beam_search(self, *_: object, **__: object) -> None:
        raise NotImplementedError(
            "Beam search is not supported: drafts are verified along one sequence."
        )

    def encode(self, *_: object, **__: object) -> None:
        raise NotImplementedError(
            "encode() belongs to pooling models; Gemma 2 generates text. To get token "
            "ids use get_tokenizer().encode(text)."
        )

    def embed(self, *_: object, **__: object) -> None:
        raise NotImplementedError(
            "embed() belongs to pooling models; Gemma 2 generates text."
        )

    def _run(
        self, request_ids: list[str], use_tqdm: bool | Callable[..., Any]
    ) -> list[RequestOutput]:
        """Step the engine until it is idle; return the outputs in the order asked."""
        finished: dict[str, RequestOutput] = {}
        num_input = num_output = 0
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        with make_bar(
            total=len(request_ids),
            desc="Processed prompts",
            dynamic_ncols=True,
            disable=not use_tqdm,
            postfix=_speed(0, 0, 1.0),
        ) as bar:
            while self.llm_engine.has_unfinished_requests():
                for output in self.llm_engine.step():
                    if not output.finished:
                        continue
                    finished[output.request_id] = output
                    num_input += len(output.prompt_token_ids or ())
                    num_output += sum(len(text.token_ids) for text in output.outputs)
                    if use_tqdm:
                        seconds = bar.format_dict["elapsed"] or 1e-9
                        bar.postfix = _speed(num_input, num_output, seconds)
                    bar.update(1)
        return [finished[request_id] for request_id in request_ids]


def _speed(num_input: int, num_output: int, seconds: float) -> str:
    return (
        f"est. speed input: {num_input / seconds:.2f} toks/s, "
        f"output: {num_output / seconds:.2f} toks/s"
    )


def _refuse(name: str, value: object) -> None:
    if value is not None:
        raise UnsupportedError(
            f"{name}={value!r} is not supported yet; leave it out.",
            parameter=name,
            value=value,
        )


def _join_token_ids(prompts: Any, prompt_token_ids: Any) -> list[Any]:
    """Bring the older pair (prompts, prompt_token_ids) into one list of prompts."""
    if prompt_token_ids is None:
        if prompts is None:
            allowed = "a prompt or a list of prompts"
            raise wrong_argument(RequestError, "prompts", allowed, prompts)
        return split_prompts(prompts)
    warnings.warn(
        "prompt_token_ids= is deprecated: pass the ids, or "
        "{'prompt_token_ids': ids}, as prompts.",
        DeprecationWarning,
        stacklevel=3,
    )
    all_ids = split_prompts(prompt_token_ids)
    texts = [None] * len(all_ids) if prompts is None else split_prompts(prompts)
    if len(texts) != len(all_ids):
        raise RequestError(
            f"prompts and prompt_token_ids must have one length, got {len(texts)} and "
            f"{len(all_ids)}.",
            parameter="prompt_token_ids",
            value=len(all_ids),
        )
    return [
        {"prompt": text, "prompt_token_ids": token_ids}
        for text, token_ids in zip(texts, all_ids, strict=True)
    ]


def _one_per_prompt(params: Any, num_prompts: int) -> list[SamplingParams]:
    """Return copies that report only finished requests, one for each prompt."""
    if isinstance(params, SamplingParams):
        params = [params] * num_prompts
    if not isinstance(params, (list, tuple)):
        allowed = "SamplingParams or a list of them"
        raise wrong_argument(RequestError, "sampling_params", allowed, params)
    if len(params) != num_prompts:
        raise RequestError(
            f"A list of sampling_params must have one entry per prompt: got "
            f"{len(params)} for {num_prompts} prompts.",
            parameter="sampling_params",
            value=len(params),
        )
    copies = []
    for position, given in enumerate(params):
        if not isinstance(given, SamplingParams):
            name = f"sampling_params[{position}]"
            raise wrong_argument(RequestError, name, "SamplingParams", given)
        copies.append(given.clone())
        copies[-1].output_kind = RequestOutputKind.FINAL_ONLY
    return copies
