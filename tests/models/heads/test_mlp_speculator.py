"""The MLP speculator's stages equal torch's."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxspec.errors import ConfigError
from jaxspec.models.heads import mlp_speculator
from jaxspec.models.heads.config import MlpSpeculatorConfig
from jaxspec.models.heads.weights import load_head
from jaxspec.sharding import make_mesh
from tests.models.heads import torch_heads as theirs
from tests.models.heads.targets import target_config

STAGES = 3
CONTENT = dict(
    model_type="mlp_speculator",
    architectures=["MLPSpeculatorPreTrainedModel"],
    vocab_size=theirs.VOCAB,
    emb_dim=theirs.HIDDEN,
    inner_dim=theirs.INNER,
    n_predict=STAGES,
)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    ("scale_input", "prefix"), [(True, "speculator."), (False, "")]
)
def test_all_stages_equal_torch(tmp_path, is_tied, scale_input, prefix):
    tensors = theirs.mlp_tensors(STAGES, is_tied=is_tied, prefix=prefix)
    content = CONTENT | dict(tie_weights=is_tied, scale_input=scale_input)
    theirs.write(tmp_path, content, tensors)
    config, params = load_head(
        tmp_path, target_config(), dtype=jnp.dtype(jnp.float32), mesh=make_mesh(1)
    )
    assert isinstance(config, MlpSpeculatorConfig)
    random = torch.Generator().manual_seed(4)
    rows = torch.randn(5, theirs.HIDDEN, generator=random)
    tokens = torch.randint(theirs.VOCAB, (STAGES, 5), generator=random)
    bare = {name.removeprefix(prefix): value for name, value in tensors.items()}
    wanted = theirs.mlp_logits(
        bare, rows, tokens, stages=STAGES, scale_input=scale_input
    )
    state = mlp_speculator.start(config, jnp.asarray(rows.numpy()))
    for stage in range(STAGES):
        given = jnp.asarray(tokens[stage].numpy(), jnp.int32)
        state = mlp_speculator.forward(config, params, stage, given, state)
        found = mlp_speculator.logits(config, params, stage, state)
        np.testing.assert_allclose(found, wanted[stage], atol=1e-4)


@pytest.mark.parametrize("name", ["proj.2.weight", "emb.1.weight", "ln.2.bias"])
def test_stages_that_are_said_to_be_tied_are_compared(tmp_path, name):
    tensors = theirs.mlp_tensors(STAGES, is_tied=True)
    tensors[name].view(-1)[-1] += 1
    content = dict(CONTENT, tie_weights=True)
    with pytest.raises(ConfigError, match=f"{name} and .* differ"):
        load_head(
            theirs.write(tmp_path, content, tensors),
            target_config(),
            dtype=jnp.dtype(jnp.float32),
            mesh=make_mesh(1),
        )
