"""vLLM on a CPU, by its `LLM.generate`, in an environment of its own; see `answer`."""

import os
from typing import Any

import vllm  # pyright: ignore[reportMissingImports]
from answer import answer
from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

COUNTERS = {
    "vllm:spec_decode_num_drafts": "rounds",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}


class VLLM:
    """One `LLM` without prefix caching, as for all peers."""

    def __init__(self, task: dict[str, Any]):
        drafting: dict[str, Any] = {
            "plain": {},
            "draft": {"method": "draft_model", "model": task["draft"]},
            "n-gram": {
                "method": "ngram",
                "prompt_lookup_max": task["lookup_max"],
                "prompt_lookup_min": 1,
            },
        }[task["mode"]]
        more: dict[str, Any] = {}
        if drafting:
            drafting["num_speculative_tokens"] = task["num_drafts"]
            more["speculative_config"] = drafting
        if task["mode"] == "draft":
            # Layers with and without a window must share one group of the cache.
            more["disable_hybrid_kv_cache_manager"] = True
        self._llm = LLM(
            model=task["target"],
            dtype=task["dtype"],
            max_num_seqs=task["max_batch_size"],
            max_model_len=task["max_model_len"],
            enable_prefix_caching=False,
            disable_log_stats=not drafting,
            **more,
        )
        self._is_drafting = bool(drafting)
        self.version = vllm.__version__
        libraries = os.environ.get("LD_PRELOAD", "").split(":")
        self.settings = {
            "preloaded": sorted(os.path.basename(path) for path in libraries if path),
            "processes": 1,
        }

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        params = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(given, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def counts(self) -> dict[str, int]:
        if not self._is_drafting:
            return {}
        return {
            COUNTERS[metric.name]: int(metric.value)
            for metric in self._llm.get_metrics()
            if metric.name in COUNTERS
        }


if __name__ == "__main__":
    answer(VLLM)
