"""Sizes of small models."""

TINY = dict(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    query_pre_attn_scalar=20,
    attn_logit_softcapping=5.0,
    final_logit_softcapping=3.0,
    sliding_window=8,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=2,
)

MICRO = dict(
    vocab_size=16,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    query_pre_attn_scalar=8,
    sliding_window=8,
)
