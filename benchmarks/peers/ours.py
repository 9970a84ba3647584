"""This engine, by `LLM.generate`, in a process of its own; see `answer`."""

import importlib.metadata
from typing import Any

import jax
from answer import answer

from jaxspec import LLM, SamplingParams
from jaxspec.bench.parts import copy_bandwidth


class Ours:
    """One `LLM`, without prefix caching, as for all peers.

    Its arguments are those that the task lists as `engine`, or those of the bundled
    pair in the task's mode.
    """

    def __init__(self, task: dict[str, Any]):
        arguments = task.get("engine") or bundled_pair(task)
        self._llm = LLM(enable_prefix_caching=False, **arguments)
        self.version = importlib.metadata.version("jaxspec-decoding")
        self.settings: dict[str, Any] = {"jax": importlib.metadata.version("jax")}
        if task.get("measures_copy"):
            plan = self._llm.llm_engine.runner.memory
            assert plan is not None, "the engine has no memory plan"
            self.settings["weight_bytes"] = plan.facts.target.weight_bytes
            self.settings["copy_bytes_per_s"] = copy_bandwidth(jax.devices()[0])

    def generate(
        self,
        prompts: list[list[int]],
        num_tokens: int,
        num_drafts: int | None = None,
    ) -> list[list[int]]:
        """Generate greedy texts.

        Args:
            num_drafts: Maximum number of drafts per round; None: the engine's.
        """
        limit = {"num_speculative_tokens": num_drafts}
        params = SamplingParams(
            temperature=0.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=None if num_drafts is None else limit,
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


def bundled_pair(task: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's arguments for the bundled pair in one mode."""
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
    return {
        "model": task["target"],
        "dtype": task["dtype"],
        "max_num_seqs": task["max_batch_size"],
        "max_model_len": task["max_model_len"],
        **drafting,
    }


if __name__ == "__main__":
    answer(Ours)
