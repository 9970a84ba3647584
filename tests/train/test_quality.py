"""The quality cost of quantization equals HuggingFace's, summed in float64."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

from jaxspec.sharding import make_mesh
from jaxspec.train.quality import Reader, chosen, compare, cut
from tests.support.oracles import hf_logits, make_hf_model

PIECES = np.random.default_rng(0).integers(0, 60, (4, 9)).astype(np.int32)


@cache
def model(seed: int) -> Any:
    return make_hf_model(seed, sliding_window=3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    made = [tmp_path_factory.mktemp(f"model-{seed}") for seed in range(2)]
    for seed, folder in enumerate(made):
        model(seed).save_pretrained(folder)
    return made


@pytest.mark.parametrize("num_rows", [1, 4])
def test_metrics_equal_huggingface(folders, num_rows):
    mesh = make_mesh(1)
    first, second = (Reader(folder, mesh) for folder in folders)
    found = compare(first, second, PIECES, num_rows=num_rows, title="reading")
    theirs, own = (
        np.array([log_softmax(hf_logits(model(seed), one), -1)[:-1] for one in PIECES])
        for seed in range(2)
    )
    losses = [
        -np.take_along_axis(one, PIECES[:, 1:, None], axis=2).mean()
        for one in (theirs, own)
    ]
    assert found.num_tokens == 4 * 8
    assert found.reference_perplexity == pytest.approx(np.exp(losses[0]), rel=1e-4)
    assert found.perplexity == pytest.approx(np.exp(losses[1]), rel=1e-4)
    divergence = (np.exp(theirs) * (theirs - own)).sum(axis=2).mean()
    assert divergence > 0.1
    assert found.kl_nats_per_token == pytest.approx(divergence, rel=1e-4)
    assert found.share_of_same_first == (theirs.argmax(2) == own.argmax(2)).mean()


@pytest.mark.slow
def test_quantized_weights_and_kv_are_compared_with_unquantized_weights(folders):
    mesh = make_mesh(1)
    plain = Reader(folders[0], mesh)

    def cost(**form: Any) -> float:
        reader = Reader(folders[0], mesh, **form)
        found = compare(plain, reader, PIECES, num_rows=4, title="reading")
        return found.kl_nats_per_token

    assert cost() == 0
    # int8 has a scale per token and head; fp8 has only three mantissa bits.
    assert 0 < cost(kv_kind="int8") < cost(kv_kind="fp8") < 0.1
    assert 0 < cost(kind="int8") < 0.1
    assert Reader(folders[0], mesh, kind="int8").num_bytes < 0.7 * plain.num_bytes
    # Devices share both models.
    shared = Reader(folders[0], make_mesh(2))
    found, expected = (np.asarray(one.log_probs(PIECES)) for one in (shared, plain))
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_pieces_are_whole_and_divisible_by_rows():
    def encode(text: str) -> list[int]:
        return list(map(ord, text))

    pieces = cut(["abcdefg", "xy", "hijkl"], encode, length=3, num_rows=1)
    assert ["".join(map(chr, one)) for one in pieces] == ["abc", "def", "hij"]
    assert len(cut(["abcdefg", "hijkl"], encode, length=3, num_rows=2)) == 2
    assert cut(["abc"], encode, length=3, num_rows=2).shape == (0, 3)
    # Texts are chosen evenly.
    assert chosen("abcdefghi", 3) == ["a", "d", "g"]
    assert chosen("ab", 5) == ["a", "b"]
