"""Gemma 2 equals HuggingFace's eager float32 model, however the tokens arrive."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracles import PagedModel, hf_logits, load_ours, make_hf_model, model_config

# Each makes one feature bind that another leaves idle.
CONFIGS = {
    "base": {},
    "one_kv_head": dict(num_key_value_heads=1),
    "all_kv_heads": dict(num_key_value_heads=4),
    "scalar_is_not_head_dim": dict(query_pre_attn_scalar=3, head_dim=16),
    "wide_heads": dict(head_dim=32, hidden_size=40),
    "tight_attention_cap": dict(attn_logit_softcapping=1.0),
    "tight_final_cap": dict(final_logit_softcapping=0.5),
    "window_of_three": dict(sliding_window=3),
    "no_caps": dict(attn_logit_softcapping=None, final_logit_softcapping=None),
    "deep": dict(num_hidden_layers=7, rope_theta=500.0),
}
PROMPT = np.random.default_rng(1).integers(0, 96, 50)


def one_shot(model: PagedModel) -> np.ndarray:
    return model.feed(PROMPT)


def chunked(model: PagedModel) -> np.ndarray:
    # Uneven chunks across page borders, with pad rows before them.
    pieces = np.split(PROMPT, [1, 8, 21, 37])
    return np.concatenate([model.feed(piece, pads=2) for piece in pieces])


def token_by_token(model: PagedModel) -> np.ndarray:
    return np.concatenate([model.feed(PROMPT[i : i + 1]) for i in range(50)])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("feed", [one_shot, chunked, token_by_token])
def test_logits_equal_huggingface(name, feed):
    reference = make_hf_model(**CONFIGS[name])
    ours = PagedModel(model_config(reference), load_ours(reference))
    difference = np.abs(feed(ours) - hf_logits(reference, PROMPT))
    assert difference.max() <= 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        dict(attn_logit_softcapping=None),
        dict(final_logit_softcapping=None),
        dict(sliding_window=50),
        dict(query_pre_attn_scalar=8),
    ],
)
def test_every_feature_binds_in_the_base_config(changes):
    """Otherwise the comparison above would prove nothing about the feature."""
    base, changed = make_hf_model(), make_hf_model(**changes)
    difference = np.abs(hf_logits(base, PROMPT) - hf_logits(changed, PROMPT))
    assert difference.max() > 0.05


def test_eight_devices_give_the_logits_of_one():
    reference = make_hf_model(num_attention_heads=8, vocab_size=96)
    config = model_config(reference)
    single = PagedModel(config, load_ours(reference))
    split_params = load_ours(reference, shards=8)
    devices = {
        len(leaf.sharding.device_set)
        for leaf in (split_params["embedding"], split_params["final_norm"])
    }
    assert devices == {8}
    assert split_params["embedding"].addressable_shards[0].data.shape == (12, 48)
    difference = np.abs(one_shot(single) - one_shot(PagedModel(config, split_params)))
    assert difference.max() <= 1e-4


def test_bfloat16_is_close_to_float32():
    reference = make_hf_model(sharpness=1.0)
    config = model_config(reference)
    exact = one_shot(PagedModel(config, load_ours(reference)))
    rounded = one_shot(PagedModel(config, load_ours(reference, dtype=jnp.bfloat16)))
    # bf16 has 8 bits of mantissa; four layers of it on logits of size 3.
    assert np.abs(exact - rounded).max() <= 0.25
    assert np.mean(exact.argmax(-1) == rounded.argmax(-1)) >= 0.8
