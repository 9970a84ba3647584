"""One request for several texts: `n` children, whose outputs are told as one."""

import itertools

from jaxspec.outputs import RequestOutput
from jaxspec.sampling_params import RequestOutputKind, SamplingParams


class Parent:
    """A request of `n` texts and what is known of them.

    Every text is a request of its own with `n=1`. A seeded one gets the seed plus its
    index, so that text i of a request is the text of a request with that seed.

    Attributes:
        children: Ids of the requests that make the texts, by index.
        most_tokens: Of the texts that have ended, the length of the longest.
    """

    def __init__(self, request_id: str, params: SamplingParams):
        self.request_id, self._params = request_id, params
        self.children = [f"{index}_{request_id}" for index in range(params.n)]
        self.most_tokens = 0
        self._num_running = self._num_open = params.n
        self._latest: dict[int, RequestOutput] = {}
        self._new: dict[int, RequestOutput] = {}

    def child_params(self, index: int) -> SamplingParams:
        """What text `index` is made with."""
        params = self._params.clone()
        params.n = 1
        if params.seed is not None:
            params.seed += index
        return params

    def is_last(self, num_tokens: int) -> bool:
        """Note that a text has ended, with so many tokens: whether no other goes on."""
        self.most_tokens = max(self.most_tokens, num_tokens)
        self._num_open -= 1
        return not self._num_open

    def add(self, index: int, output: RequestOutput) -> None:
        """Take what a child has to tell."""
        output.outputs[0].index = index
        output.request_id = self.request_id
        self._latest[index] = self._new[index] = output
        self._num_running -= output.finished

    def tell(self) -> RequestOutput | None:
        """One output of all that is new, if this request's `output_kind` wants it.

        The final one has all texts. Deltas are of the texts that go on, and every
        other output repeats the texts that do not.
        """
        kind = self._params.output_kind
        is_finished = not self._num_running
        if kind is RequestOutputKind.FINAL_ONLY and not is_finished:
            return None
        told = self._new if kind is RequestOutputKind.DELTA else self._latest
        outputs = [told[index] for index in sorted(told)]
        completions = itertools.chain.from_iterable(one.outputs for one in outputs)
        self._new = {}
        first = outputs[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=first.prompt,
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=first.prompt_logprobs,
            outputs=list(completions),
            finished=is_finished,
            metrics=first.metrics,
            num_cached_tokens=first.num_cached_tokens,
        )
