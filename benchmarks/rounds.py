"""Where the time of a round goes: rounds of every K, and the draft model by itself."""

from pathlib import Path
from statistics import median
from typing import Any

import jax
from measure import Sample, run_in_turn, run_once, sampling, warm_up
from tqdm.auto import tqdm

from jaxspec.engine.llm_engine import LLMEngine


def profile(
    engine: LLMEngine,
    draft_alone: LLMEngine,
    prompts: list[list[int]],
    *,
    num_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """Time rounds with every K of the engine's ladder, and plain rounds of the draft.

    Returns:
        `rounds`: median seconds by K; `draft_alone`: the same of the draft as a model
        of its own, which is one draft pass and what every round costs.
    """
    ladder = engine.controller.ladder
    modes = {str(k): sampling(num_tokens, k, temperature=0.0) for k in ladder}
    plain = {"alone": sampling(num_tokens, 0, temperature=0.0)}
    by_mode: dict[str, list[Sample]] = {name: [] for name in (*modes, *plain)}
    for prompt in tqdm(prompts, desc="rounds"):
        samples = run_in_turn(engine, prompt, modes, repeats)
        samples |= run_in_turn(draft_alone, prompt, plain, repeats)
        for name, found in samples.items():
            by_mode[name] += found
    return {
        "rounds": {k: _cost(by_mode[str(k)]) for k in ladder},
        "draft_alone": _cost(by_mode["alone"]),
    }


def _cost(samples: list[Sample]) -> dict[str, float]:
    rounds = sum(one.num_rounds for one in samples)
    return {
        "round_s": median(one.decode_s / one.num_rounds for one in samples),
        "host_s": median(one.host_s / one.num_rounds for one in samples),
        "tokens_per_round": sum(len(one.token_ids) - 1 for one in samples) / rounds,
    }


def trace(engine: LLMEngine, prompt: list[int], num_tokens: int, folder: Path) -> None:
    """Write jax's own profile of one speculative request."""
    params = sampling(num_tokens, max(engine.controller.ladder), temperature=0.0)
    warm_up(engine, prompt, params)
    with jax.profiler.trace(str(folder)):
        run_once(engine, prompt, params)
