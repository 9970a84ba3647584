"""Gemma 2 and 3 equal HuggingFace's eager float32 model, however the tokens arrive.

Compiling takes most of the time, so every way to run the tokens has one shape. The fast
part runs every config in chunks and two of them in every way; the slow part runs the
rest.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxspec.models.layers import rope_tables
from tests.support.oracles import (
    PagedModel,
    hf_logits,
    load_ours,
    make_gemma3,
    make_hf_model,
    model_config,
)

# One local and one global layer. In each config, a feature has an effect that it lacks
# in the others.
SHALLOW = dict(num_hidden_layers=2)
CONFIGS: dict[str, dict[str, Any]] = {
    "base": {},
    "one_kv_head": dict(num_key_value_heads=1),
    "all_kv_heads": dict(num_key_value_heads=4),
    "scalar_is_not_head_dim": dict(query_pre_attn_scalar=3, head_dim=16),
    "wide_heads": dict(head_dim=32, hidden_size=40, intermediate_size=320),
    "tight_attention_cap": dict(attn_logit_softcapping=1.0),
    "tight_final_cap": dict(final_logit_softcapping=0.5),
    "window_of_three": dict(sliding_window=3),
    "no_caps": dict(attn_logit_softcapping=None, final_logit_softcapping=None),
    "untied": dict(tie_word_embeddings=False),
    "deep": dict(num_hidden_layers=5, rope_theta=500.0),
}
# The prompt is six windows long. The last two of eight layers start a period.
GEMMA3: dict[str, dict[str, Any]] = {
    "gemma3": {},
    "gemma3_two_kv_heads": dict(num_key_value_heads=2),
    "gemma3_all_global": dict(num_hidden_layers=2, sliding_window_pattern=1),
    "gemma3_positions_not_scaled": dict(num_hidden_layers=6, rope_scaling=None),
    "gemma3_other_pattern": dict(
        num_hidden_layers=3,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
}
RUN_IN_EVERY_WAY = ("window_of_three", "gemma3")
PROMPT = np.random.default_rng(1).integers(0, 96, 50)


def one_shot(model: PagedModel) -> np.ndarray:
    return model.run(PROMPT)


def chunked(model: PagedModel) -> np.ndarray:
    # Chunks of different lengths, some across page borders, padded on the left.
    pieces = np.split(PROMPT, [1, 8, 21, 37])
    return np.concatenate([model.run(piece, pads=16 - len(piece)) for piece in pieces])


def token_by_token(model: PagedModel) -> np.ndarray:
    return np.concatenate([model.run(token) for token in np.split(PROMPT, 50)])


@functools.cache
def huggingface(name: str) -> tuple[Any, np.ndarray]:
    if name in GEMMA3:
        model = make_gemma3(**GEMMA3[name])
    else:
        model = make_hf_model(**(SHALLOW | CONFIGS[name]))
    return model, hf_logits(model, PROMPT)


@pytest.mark.parametrize(
    ("name", "run"),
    [
        pytest.param(
            name,
            run,
            marks=[]
            if run is chunked or name in RUN_IN_EVERY_WAY
            else [pytest.mark.slow],
        )
        for name in CONFIGS | GEMMA3
        for run in (one_shot, chunked, token_by_token)
    ],
)
def test_logits_equal_huggingface(name, run):
    reference, expected = huggingface(name)
    ours = PagedModel(model_config(reference), load_ours(reference))
    atol = 1e-5 if name in GEMMA3 else 1e-4
    assert np.abs(run(ours) - expected).max() <= atol
    assert ours.num_traces == 1


def without(name: str) -> Any:
    """Return the base Gemma 3 with zero weights in the norms of this name."""
    model = make_gemma3()
    with torch.no_grad():
        for path, value in model.named_parameters():
            if path.endswith(f"{name}.weight"):
                value.zero_()
    return model


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ("base", dict(attn_logit_softcapping=None)),
        ("base", dict(final_logit_softcapping=None)),
        ("base", dict(sliding_window=50)),
        ("base", dict(query_pre_attn_scalar=8)),
        ("gemma3", dict(sliding_window=9)),
        ("gemma3", dict(query_pre_attn_scalar=16)),
        ("gemma3", dict(sliding_window_pattern=8)),
        ("gemma3", dict(rope_scaling=None)),
        ("gemma3", dict(rope_theta=100.0)),
        ("gemma3", dict(rope_local_base_freq=1000.0)),
        ("gemma3", "q_norm"),
        ("gemma3", "k_norm"),
    ],
)
def test_every_feature_has_an_effect_in_the_base_config(base, changes):
    """Without this, the comparison above would prove nothing about a feature."""
    if isinstance(changes, str):
        changed = without(changes)
    elif base == "gemma3":
        changed = make_gemma3(**changes)
    else:
        changed = make_hf_model(**SHALLOW, **changes)
    _, expected = huggingface(base)
    assert np.abs(expected - hf_logits(changed, PROMPT)).max() > 0.05


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "is_tied"),
    [
        (8, 2, False),
        pytest.param(8, 8, True, marks=pytest.mark.slow),
        (24, 3, True),
        (8, 1, True),
    ],
)
def test_eight_devices_equal_one(num_q_heads, num_kv_heads, is_tied):
    """Two KV heads are copied, eight are split, and three are on every device.

    Every device has the single KV head of a Gemma 3, and the norms of heads.
    """
    if num_kv_heads == 1:
        reference, atol = make_gemma3(num_attention_heads=num_q_heads), 1e-5
    else:
        heads = dict(num_attention_heads=num_q_heads, num_key_value_heads=num_kv_heads)
        reference = make_hf_model(**heads, tie_word_embeddings=is_tied, **SHALLOW)
        atol = 1e-4
    params = load_ours(reference, shards=8)
    assert ("head" in params) is not is_tied
    for name in {"embedding", "head"} & params.keys():
        shape = params[name].values.addressable_shards[0].data.shape
        rows, features = params[name].shape
        assert shape == (rows // 8, features)
    logits = one_shot(PagedModel(model_config(reference), params))
    assert np.abs(logits - hf_logits(reference, PROMPT)).max() <= atol


@pytest.mark.parametrize("is_gemma3", [False, True])
def test_bfloat16_is_close_to_float32(is_gemma3):
    # The error limits are for two layers with a mantissa of 8 bits and logits of size
    # 3, and for six layers and logits of size 4.
    reference, atol = make_hf_model(sharpness=1.0, **SHALLOW), 0.25
    if is_gemma3:
        reference, atol = make_gemma3(sharpness=1.0, num_hidden_layers=6), 0.5
    exact = hf_logits(reference, PROMPT)
    params = load_ours(reference, dtype=jnp.bfloat16)
    rounded = one_shot(PagedModel(model_config(reference), params))
    assert np.abs(exact - rounded).max() <= atol
    assert np.mean(exact.argmax(-1) == rounded.argmax(-1)) >= 0.8


def test_rope_angles_equal_float64():
    positions = np.array([0, 1, 255, 256, 257, 258, 4095, 8191])
    cos, sin = rope_tables(jnp.asarray(positions, jnp.int32), 8, 10000.0)
    angle = positions[:, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    # At an angle of 8191, float32 numbers are 0.0005 apart, and bfloat16 numbers 32.
    np.testing.assert_allclose(cos[:, 0], np.cos(angle), atol=5e-4)
    np.testing.assert_allclose(sin[:, 0], np.sin(angle), atol=5e-4)
    # Linear scaling divides positions.
    scaled = rope_tables(jnp.arange(0, 80, 8), 8, 10000.0, 8.0)
    plain = rope_tables(jnp.arange(10), 8, 10000.0)
    for ours, expected in zip(scaled, plain, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6)


def test_bfloat16_parameters_keep_distant_positions_apart():
    """Angles are in float32: past 256, bfloat16 gives neighbours the same position."""
    reference = make_hf_model(
        **SHALLOW, sliding_window=512, max_position_embeddings=512
    )
    prompt = np.random.default_rng(2).integers(0, 96, 300)
    exact = hf_logits(reference, prompt)
    params = load_ours(reference, dtype=jnp.bfloat16)
    ours = PagedModel(model_config(reference), params, num_pages=80)
    error = np.abs(ours.run(prompt) - exact)
    assert error[257:].mean() <= 1.5 * error[:256].mean()
