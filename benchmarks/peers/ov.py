"""openvino-genai's `LLMPipeline`, in an environment of its own; see `answer`."""

from typing import Any

import numpy as np
import openvino  # pyright: ignore[reportMissingImports]
import openvino_genai  # pyright: ignore[reportMissingImports]
from answer import answer


class OpenVINO:
    """A pipeline in float32, including the KV cache, whose default is 8 bits."""

    def __init__(self, task: dict[str, Any]):
        precision = {"float32": "f32", "bfloat16": "bf16"}[task["dtype"]]
        self.settings = {
            "INFERENCE_NUM_THREADS": task["threads"],
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        }
        self._config = openvino_genai.GenerationConfig()
        self._config.do_sample = False
        self._config.ignore_eos = True
        more: dict[str, Any] = {}
        if task["mode"] == "draft":
            more["draft_model"] = openvino_genai.draft_model(
                task["draft"], "CPU", **self.settings
            )
        elif task["mode"] == "n-gram":
            more["prompt_lookup"] = True
            self._config.max_ngram_size = task["lookup_max"]
        if more:
            self._config.num_assistant_tokens = task["num_drafts"]
        self._pipeline = openvino_genai.LLMPipeline(
            task["target"], "CPU", **more, **self.settings
        )
        self._counts = {"rounds": 0, "drafted": 0, "accepted": 0}
        self.version = openvino_genai.__version__

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = np.zeros((len(prompts), longest), np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        self._config.max_new_tokens = num_tokens
        output = self._pipeline.generate(
            openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(mask)),
            self._config,
        )
        self._count(output, len(prompts) * (num_tokens - 1))
        return [list(map(int, tokens)) for tokens in output.tokens]

    def _count(self, output: Any, num_decoded: int) -> None:
        """Count drafts: a token after prefill is an accepted draft, or the target's."""
        metrics = getattr(output, "extended_perf_metrics", None)
        if metrics is not None:
            accepted = int(metrics.get_num_accepted_tokens())
            drafted = int(metrics.draft_model_metrics.get_num_generated_tokens())
            self._counts["accepted"] += accepted
            self._counts["drafted"] += drafted
            self._counts["rounds"] += num_decoded - accepted

    def counts(self) -> dict[str, int]:
        return dict(self._counts)


if __name__ == "__main__":
    answer(OpenVINO)
