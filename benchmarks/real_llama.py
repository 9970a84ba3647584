"""Runs llama.cpp on a GGUF file (package `xllamacpp`), as a child of `benchmarks.real`.

Reads the model, settings and prompts as JSON from standard input; prints tokens/s by
domain.
"""

import json
import statistics
import sys
from importlib import metadata
from typing import Any

import xllamacpp


def main() -> None:
    given: dict[str, Any] = json.load(sys.stdin)
    library: Any = xllamacpp  # its types are not declared
    params = library.CommonParams()
    params.model.path = given["path"]
    params.n_ctx, params.n_parallel = 1024, 1
    params.cpuparams.n_threads = given["threads"]
    params.cpuparams_batch.n_threads = given["threads"]
    server = library.Server(params)
    speeds: dict[str, list[float]] = {}
    for domain, text in given["prompts"]:
        runs = []
        for _ in range(given["repeats"]):
            request = {
                "prompt": text,
                "n_predict": given["num_tokens"],
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": False,
            }
            answer: Any = server.handle_completions(request)
            runs.append(answer["timings"]["predicted_per_second"])
        speeds.setdefault(domain, []).append(statistics.median(runs))
    found: dict[str, Any] = {
        domain: statistics.median(values) for domain, values in speeds.items()
    }
    found["version"] = metadata.version("xllamacpp")
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
