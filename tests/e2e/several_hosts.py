"""Run the leader, or the only process, of a multi-host test.

This script reads a JSON file with the engine's arguments and the test's steps, and
writes the results. Followers run `python -m jaxspec.serve --headless`.
"""

import json
import sys
from pathlib import Path
from typing import Any

from jaxspec import LLM, SamplingParams
from jaxspec.sampling_params import StructuredOutputsParams

PROMPTS = [[2, 10, 20, 30], [2, 11, 7, 5, 9, 300, 41], list(range(2, 60)), [2, 77]]


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Return four kinds of requests: greedy, seeded, with logprobs, with a grammar."""
    always: dict[str, Any] = dict(max_tokens=24, ignore_eos=True)
    greedy = SamplingParams(temperature=0, **always)
    seeded = SamplingParams(temperature=0.9, top_p=0.95, seed=7, **always)
    logprobs = SamplingParams(temperature=0, logprobs=2, **always)
    form = StructuredOutputsParams(regex="(yes|no|maybe)( (yes|no|maybe)){4}")
    bound = SamplingParams(
        temperature=0.8, seed=3, max_tokens=24, structured_outputs=form
    )
    found = [(prompt, greedy) for prompt in PROMPTS]
    found += [(prompt, seeded) for prompt in PROMPTS]
    return [*found, (PROMPTS[1], logprobs), (PROMPTS[3], bound)]


def generate(llm: LLM, count: int | None = None) -> list[list[int]]:
    """Run the requests in one batch; return their tokens."""
    chosen = requests()[:count]
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in chosen],
        [params for _, params in chosen],
        use_tqdm=False,
    )
    return [list(one.outputs[0].token_ids) for one in outputs]


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    result: dict[str, Any] = {}
    with LLM(**given["arguments"]) as llm:
        engine: Any = llm.llm_engine
        if given.get("warms_up"):
            llm.warm_up(64)
        result["local_window"] = engine.config.local_window
        result["texts"] = generate(llm)
        for level in given.get("sleeps", []):
            engine.sleep(level)
            engine.wake_up()
            result[f"after sleep {level}"] = generate(llm, 2)
        result["num_launches"] = engine.runner.num_launches
        result["num_questions"] = engine.runner.token_masks.num_questions
        result["num_drafts"] = engine.stats.num_draft_tokens
        result["num_accepted"] = engine.stats.num_accepted_tokens
        result["num_timed"] = len(engine.calibrator.timed)
        result["ks"] = sorted({one.num_levels for one in engine.runner.compiler.made})
    Path(given["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
