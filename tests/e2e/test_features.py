"""Under every control, drafting says what plain decoding says, and both obey.

Log-probabilities are those of one pass over what was said.
"""

from typing import Any

import numpy as np
import pytest

from jaxspec.engine.runner import Runner
from jaxspec.program.plan import Features, TokenControls
from jaxspec.program.wire import TokenLogprobs
from tests.support import pair
from tests.support.launches import Played, play, request
from tests.support.laws import controlled
from tests.support.oracles import hf_logits

pytestmark = pytest.mark.slow  # four programs to compile

LENGTH = 30
FEATURES = Features(has_controls=True, num_logprobs=5, num_prompt_logprobs=3)
STOP = 5
EVERYTHING = TokenControls(
    presence_penalty=0.5,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    bias=tuple((token, 1.5 - token / 20) for token in range(0, 64, 2)),
    allowed=tuple(token for token in range(64) if token % 7),
    bad_words=tuple((token, token + 1) for token in range(60)),
    told=(63, 3, 17),
)
CONTROLS: dict[str, TokenControls | None] = {
    "none": None,
    "presence": TokenControls(presence_penalty=1.0),
    "frequency": TokenControls(frequency_penalty=0.8),
    "negative": TokenControls(presence_penalty=-0.5, frequency_penalty=-0.2),
    "repetition": TokenControls(repetition_penalty=1.5),
    "bias": TokenControls(bias=((10, 4.0), (20, -100.0), (30, 5.0))),
    "allowed": TokenControls(allowed=tuple(range(STOP, 40, 3))),
    "everything": EVERYTHING,
}


def runner() -> Runner:
    made: Any = pair.engine().runner
    return made


def ask(name: str, index: int, **values: Any) -> Played:
    random = np.random.default_rng(index)
    prompt = random.integers(3, 64, int(random.integers(2, 45))).tolist()
    given: dict[str, Any] = dict(min_tokens=4, stop_ids=(STOP,)) | values
    return request(prompt, max_tokens=LENGTH, controls=CONTROLS[name], **given)


def texts(requests: list[Played], num_drafts: int) -> list[list[int]]:
    """Two at a time, as many as the engine has rows: neighbours ask other things."""
    for index in range(0, len(requests), 2):
        some = requests[index : index + 2]
        play(runner(), some, num_drafts=num_drafts, features=FEATURES)
    return [one.tokens for one in requests]


def margin(one: Played) -> float:
    """How clearly HuggingFace's controlled argmax is what was said; < 0: it is not."""
    said, start = one.prompt + one.tokens, len(one.prompt)
    logits = hf_logits(pair.target(), np.array(said))
    least = np.inf
    for place in range(start, len(said)):
        row = np.array(logits[place - 1], np.float64)
        if one.admission.controls is not None:
            row = controlled(row, said[:place], start, one.admission.controls)
        if place < one.admission.min_total:
            row[list(one.admission.stop_ids)] = -np.inf
        best = row[said[place]]
        row[said[place]] = -np.inf
        least = min(least, best - row.max())
    return float(least)


def check_greedy(names: list[str]) -> None:
    plain = [ask(name, index) for index, name in enumerate(names)]
    drafted = [ask(name, index) for index, name in enumerate(names)]
    texts(plain, 0)
    texts(drafted, pair.NUM_DRAFT)
    for name, one, other in zip(names, plain, drafted, strict=True):
        assert margin(one) > pair.MIN_MARGIN, name
        assert one.tokens == other.tokens, name
        assert one.is_done
    accepted = [count for one in drafted for count in one.num_accepted]
    assert 0 < np.mean(accepted) < pair.NUM_DRAFT


def test_greedy_text_is_that_of_controlled_argmax():
    check_greedy(list(CONTROLS))


def test_controls_change_what_is_said():
    free = texts([ask("none", 3)] + [ask("none", 4)], 0)
    for name in CONTROLS:
        found = texts([ask(name, 3), ask(name, 4)], 0)
        assert (found == free) == (name == "none"), name


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_coupled_text_does_not_depend_on_drafts(temperature):
    values: dict[str, Any] = dict(temperature=temperature, top_p=0.95, rule="coupled")
    names = list(CONTROLS)
    found = {
        drafts: texts(
            [
                ask(name, index, seed=index, **values)
                for index, name in enumerate(names)
            ],
            drafts,
        )
        for drafts in (0, pair.NUM_DRAFT)
    }
    assert found[0] == found[pair.NUM_DRAFT]


def test_a_row_forgets_the_controls_of_its_last_request():
    """Also where the next request comes in a launch without any."""
    texts([ask("everything", 1), ask("bias", 2)], pair.NUM_DRAFT)
    for features in (FEATURES, Features()):
        again = [ask("none", 5), ask("none", 6)]
        play(runner(), again, num_drafts=pair.NUM_DRAFT, features=features)
        for one in again:
            assert margin(one) > pair.MIN_MARGIN


def test_forbidden_words_never_come():
    one = ask("everything", 8, temperature=1.5, min_tokens=LENGTH - 1)
    (text, _) = texts([one, ask("none", 9)], pair.NUM_DRAFT)
    assert len(text) == LENGTH
    assert all(token % 7 for token in text)
    assert all(b != a + 1 for a, b in zip(text, text[1:], strict=False))
    assert STOP not in text[:-1]


def check_logprobs(
    told: list[TokenLogprobs],
    tokens: list[int],
    logits: Any,
    chosen: tuple[int, ...] = (),
) -> None:
    """What was told of each token, against the row of logits that it follows."""
    assert len(told) == len(tokens) == len(logits)
    logits = np.array(logits, np.float64)
    laws = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for one, token, law in zip(told, tokens, laws, strict=True):
        np.testing.assert_allclose(one.own, law[token], atol=1e-4)
        ranked = np.sort(law)[::-1]
        np.testing.assert_allclose(one.top, ranked[: len(one.top)], atol=1e-4)
        np.testing.assert_allclose(law[one.top_ids], one.top, atol=1e-4)
        assert len(set(one.top_ids.tolist())) == len(one.top)
        others = one.chosen[: len(chosen)]
        np.testing.assert_allclose(others, law[list(chosen)], atol=1e-4)
        # A rank is exact up to what rounding can exchange.
        assert (law > one.own + 1e-4).sum() < one.rank <= (law > one.own - 1e-4).sum()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_drafts", [0, pair.NUM_DRAFT])
def test_log_probabilities_are_those_of_one_pass(temperature, num_drafts):
    """Of the model itself, whatever controls did, and wherever a round was cut."""
    prompts = {"short": 7, "one tile": 32, "two tiles": 45}
    random = np.random.default_rng(0)
    requests = [
        request(
            random.integers(3, 64, length).tolist(),
            max_tokens=LENGTH,
            temperature=temperature,
            controls=controls,
            seed=length,
        )
        for length in prompts.values()
        for controls in (None, EVERYTHING)
    ]
    texts(requests, num_drafts)
    for one in requests:
        said = one.prompt + one.tokens
        logits, start = hf_logits(pair.target(), np.array(said)), len(one.prompt)
        chosen = one.admission.controls.told if one.admission.controls else ()
        check_logprobs(one.logprobs, one.tokens, logits[start - 1 : -1], chosen)
        # The last is about the first generated token, which nobody knew then.
        told = one.prompt_logprobs[:-1]
        check_logprobs(told, one.prompt[1:], logits[: start - 1])
    accepted = {count for one in requests for count in one.num_accepted}
    assert accepted == set(range(num_drafts + 1))
