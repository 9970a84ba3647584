"""llama.cpp of the package `xllamacpp`, inside the child's process; see `answer`.

Its settings are the defaults: activations in 8 bits, keys and values in float16.
"""

from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any

import xllamacpp
from answer import answer
from llama import completion


class XLlama:
    """One server object, called from a thread for each request of a batch."""

    def __init__(self, task: dict[str, Any]):
        library: Any = xllamacpp  # its types are not declared
        params, size = library.CommonParams(), task["max_batch_size"]
        params.model.path = task["target"]
        params.n_parallel, params.n_ctx = size, size * task["max_model_len"]
        params.cpuparams.n_threads = task["threads"]
        params.cpuparams_batch.n_threads = task["threads"]
        self._server = library.Server(params)
        self._pool = ThreadPoolExecutor(size)
        self.version = metadata.version("xllamacpp")
        self.settings: dict[str, Any] = {}

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        requests = [completion(prompt, num_tokens) for prompt in prompts]
        answers = self._pool.map(self._server.handle_completions, requests)
        # The responses have no token ids: only the number of tokens is checked.
        return [[0] * one["usage"]["completion_tokens"] for one in answers]

    def counts(self) -> dict[str, int]:
        return {}


if __name__ == "__main__":
    answer(XLlama)
