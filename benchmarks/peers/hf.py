"""HuggingFace `generate`: plain, with an assistant, by prompt lookup; see `answer`."""

from typing import Any

import torch
import transformers
from answer import answer
from transformers import AutoModelForCausalLM


class HuggingFace:
    """A model and, in mode "draft", its assistant.

    A hook on the target counts its passes: transformers does not report
    acceptance. Plain decoding runs without it.
    """

    def __init__(self, task: dict[str, Any]):
        torch.set_num_threads(task["threads"])
        self._dtype = getattr(torch, task["dtype"])
        self._model = self._load(task["target"])
        self._more: dict[str, Any] = {}
        if task["mode"] == "draft":
            assistant = self._load(task["draft"])
            # K drafts in every round, whatever the assistant's confidence.
            config = assistant.generation_config
            config.num_assistant_tokens = task["num_drafts"]
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0
            self._more["assistant_model"] = assistant
        elif task["mode"] == "n-gram":
            self._more["prompt_lookup_num_tokens"] = task["num_drafts"]
            self._more["max_matching_ngram_size"] = task["lookup_max"]
        if self._more:
            self._model.register_forward_pre_hook(self._count, with_kwargs=True)
        self._counts = {"rounds": 0, "drafted": 0, "accepted": 0}
        self._pass_widths: list[int] = []
        self.version = transformers.__version__
        self.settings = {"torch": torch.__version__, "attention": "eager"}

    def _load(self, folder: str) -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=self._dtype, attn_implementation="eager"
        )
        model.generation_config.eos_token_id = None
        model.generation_config.do_sample = False
        return model.eval()

    def _count(self, _: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = arguments[0] if arguments else named["input_ids"]
        self._pass_widths.append(ids.shape[1])

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        gaps = [longest - len(prompt) for prompt in prompts]
        ids = [[0] * gap + one for gap, one in zip(gaps, prompts, strict=True)]
        mask = [
            [0] * gap + [1] * len(one) for gap, one in zip(gaps, prompts, strict=True)
        ]
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                max_new_tokens=num_tokens,
                pad_token_id=0,
                **self._more,
            )
        found = output[:, longest:].tolist()
        if self._more:
            self._sum_up(longest, len(found[0]))
        return found

    def _sum_up(self, prompt_length: int, num_tokens: int) -> None:
        """Add the counts of a text: a pass yields its accepted drafts and one token."""
        first, *others = self._pass_widths
        self._pass_widths = []
        drafted = [first - prompt_length, *(width - 1 for width in others)]
        self._counts["rounds"] += sum(count > 0 for count in drafted)
        self._counts["drafted"] += sum(drafted)
        self._counts["accepted"] += num_tokens - len(drafted)

    def counts(self) -> dict[str, int]:
        return dict(self._counts)


if __name__ == "__main__":
    answer(HuggingFace)
