"""This engine, by `LLM.generate`, in a process of its own; see `answer`."""

import importlib.metadata
from typing import Any

from answer import answer

from jaxspec import LLM, SamplingParams


class Ours:
    """One `LLM` with default settings, without prefix caching, as for all peers."""

    def __init__(self, task: dict[str, Any]):
        drafting: dict[str, Any] = {
            "plain": {},
            "draft": {"speculative_model": task["draft"]},
            "n-gram": {
                "speculative_model": "[ngram]",
                "ngram_prompt_lookup_max": task["lookup_max"],
                "ngram_prompt_lookup_min": 1,
            },
        }[task["mode"]]
        if drafting:
            drafting["num_speculative_tokens"] = task["num_drafts"]
            drafting["speculative_config"] = {"controller": task["controller"]}
        self._llm = LLM(
            model=task["target"],
            dtype=task["dtype"],
            max_num_seqs=task["max_batch_size"],
            max_model_len=task["max_model_len"],
            enable_prefix_caching=False,
            **drafting,
        )
        self.version = importlib.metadata.version("jaxspec-decoding")
        self.settings = {"jax": importlib.metadata.version("jax")}

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        params = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        outputs = self._llm.generate(
            prompt_token_ids=prompts, sampling_params=params, use_tqdm=False
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def counts(self) -> dict[str, int]:
        engine = self._llm.llm_engine
        # Wait for programs that this run requested, so that nothing compiles during the
        # next run.
        engine.wait_for_programs()
        return {
            "rounds": engine.stats.num_draft_rounds,
            "drafted": engine.stats.num_draft_tokens,
            "accepted": engine.stats.num_accepted_tokens,
            "compiles": engine.runner.num_compiles,
        }


if __name__ == "__main__":
    answer(Ours)
