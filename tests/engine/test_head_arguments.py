"""Engine arguments of heads: values read from a head's folder, and rejected values."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from huggingface_hub import constants

from jaxspec.config.engine import EngineConfig, GivenSizes
from jaxspec.engine import loader
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.memory.device_descriptions import describe
from jaxspec.engine.memory.probe import bytes_of, find_facts, fit
from jaxspec.engine.runner import build_mesh
from jaxspec.engine.scheduling.programs import Shapes
from jaxspec.engine.speculation.policy import SpeculationPolicy
from jaxspec.errors import ConfigError, UnsupportedError
from jaxspec.models.heads.config import (
    DFlashConfig,
    Eagle3Config,
    EagleConfig,
    MedusaConfig,
)
from jaxspec.models.heads.weights import save_head
from tests.support import heads
from tests.support.model_configs import TINY, write_model

VOCAB, HIDDEN = TINY["vocab_size"], TINY["hidden_size"]
SIZES: dict[str, Any] = dict(
    target_hidden_size=HIDDEN, vocab_size=VOCAB, draft_vocab_size=VOCAB
)
TREE = "speculative_token_tree"
LAYER: dict[str, Any] = dict(
    hidden_size=HIDDEN,
    intermediate_size=64,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
)
EAGLE3: dict[str, Any] = dict(draft_vocab_size=96, target_layers=(1, 2, 3))
DFLASH: dict[str, Any] = dict(
    target_layers=(1, 3),
    block_size=5,
    mask_token_id=3,
    windows=(None, 8),
    has_qk_norm=True,
)
CONFIGS: dict[str, Any] = {
    "eagle": EagleConfig(**SIZES | LAYER),
    "eagle3": Eagle3Config(**SIZES | LAYER | EAGLE3),
    "medusa": MedusaConfig(**SIZES, num_heads=3),
    "dflash": DFlashConfig(**SIZES | LAYER | DFLASH),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write targets and a head of each kind."""
    root = tmp_path_factory.mktemp("heads")
    found = {
        "target": write_model(root / "target"),
        "hidden 80": write_model(root / "hidden", hidden_size=80),
    }
    for kind, config in CONFIGS.items():
        save_head(
            root / kind,
            config,
            heads.random_params(config),
            dtype=jnp.dtype(jnp.float32),
            target_name="tiny",
            architecture="Gemma2ForCausalLM",
        )
        found[kind] = str(root / kind)
    return found


def configure(
    folders: dict[str, str],
    kind: str | None,
    target: str = "target",
    load_format: str = "auto",
    **keys: Any,
) -> EngineConfig:
    """Make a config with two drafts of a head, unless a tree is given."""
    given = {"method": kind, "model": folders.get(kind or ""), **keys}
    if TREE not in keys:
        given = {"num_speculative_tokens": 2} | given
    return EngineArgs(
        model=folders[target],
        dtype="float32",
        max_model_len=256,
        load_format=load_format,
        speculative_config={name: one for name, one in given.items() if one},
    ).create_engine_config()


@pytest.mark.parametrize("kind", CONFIGS)
def test_kind_and_sizes_of_a_head_are_read_from_its_folder(folders, kind):
    config = configure(folders, kind)
    assert config.head_config == CONFIGS[kind]
    assert config.draft_model_config is None
    assert config.speculative is not None
    assert config.speculative.method == kind
    assert config.speculative.model == folders[kind]
    assert config.max_draft_tokens == 2
    # The kind of head is read from the folder, as in vLLM.
    assert configure(folders, None, model=folders[kind]) == config
    with pytest.warns(UserWarning, match="num_speculative_tokens is not given"):
        config = configure(folders, kind, num_speculative_tokens=None)
    assert config.max_draft_tokens == (CONFIGS[kind].max_draft_tokens or 5)


CHAIN_OF_4 = str([(0,) * level for level in range(1, 5)])
OF_TARGET = "a head, which is a small network on the hidden states of the target"


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        ("medusa", {"num_speculative_tokens": 4}, "1 to 3, got 4.*medusa.* 3 tokens"),
        ("medusa", {TREE: CHAIN_OF_4}, "a tree of at most 3 levels"),
        # A model instead of a head, and a head instead of a model.
        ("eagle3", {"model": "target"}, f"holds no head .*'gemma2'.*{OF_TARGET}"),
        ("draft_model", {"model": "medusa"}, "got 'medusa'.*from a head.*'eagle', 'e"),
        # A missing folder, and a name on the Hugging Face Hub without a network.
        ("eagle3", {"model": "./nosuch"}, f"./nosuch.*{OF_TARGET}"),
        ("eagle3", {"model": "some/eagle3"}, f"some/eagle3.*{OF_TARGET}"),
    ],
)
def test_rejects_bad_arguments(folders, kind, keys, message, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    given = {name: folders.get(value, value) for name, value in keys.items()}
    with pytest.raises(ConfigError, match=f"(?s){message}") as caught:
        configure(folders, kind, **given)
    (key,) = keys
    assert caught.value.parameter == {"model": "speculative_model"}.get(key, key)


def test_rejects_head_of_another_kind_or_for_another_target(folders):
    with pytest.raises(ConfigError, match="method must be 'medusa', got 'eagle3'"):
        configure(folders, "eagle3", model=folders["medusa"])
    message = "for another target.*target_hidden_size=64, and .* has 80"
    with pytest.raises(ConfigError, match=message):
        configure(folders, "eagle3", "hidden 80")


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_heads_draft_a_chain_with_leaves_but_no_wider_tree(folders, kind):
    leaves = "[(0,), (1,), (0, 0), (0, 1)]"
    assert configure(folders, kind, speculative_token_tree=leaves).max_draft_tokens == 2
    tree = "[(0,), (1,), (0, 0), (1, 0)]"
    with pytest.raises(UnsupportedError, match=f"with leaves.*{kind}") as caught:
        configure(folders, kind, speculative_token_tree=tree)
    assert caught.value.parameter == TREE


def test_config_file_is_sufficient_for_random_weights(folders, tmp_path):
    shutil.copy(Path(folders["eagle3"]) / "config.json", tmp_path)
    config = configure(folders, "eagle3", model=str(tmp_path), load_format="dummy")
    assert config.head_config == CONFIGS["eagle3"]
    mesh = build_mesh(config)
    _, made = loader.load_weights(config, mesh)
    program, (_, (form,), _) = describe(config, mesh)
    assert program.proposers[0].has_params
    shapes = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(form)]
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(made)] == shapes


@pytest.mark.parametrize("kind", CONFIGS)
def test_memory_plan_includes_a_head_and_no_draft_prefill_programs(folders, kind):
    config = configure(folders, kind)
    mesh, head = build_mesh(config), CONFIGS[kind]
    facts = find_facts(config, mesh, GivenSizes())
    _, (_, (form,), _) = describe(config, mesh)
    # Apart from parameters and pages, heads add one vector per row to the state, but
    # DFlash does not.
    kept = 0 if kind == "dflash" else 4 * HIDDEN * config.max_num_seqs
    assert facts.draft.weight_bytes == bytes_of(form) + kept
    assert facts.draft.page_bytes == head.kv_bytes_per_token(4) * config.page_size
    assert (facts.draft.page_bytes > 0) == (kind != "medusa")
    assert facts.programs.draft_vocab_size == VOCAB
    _, plan = fit(config, mesh)
    assert "draft weights" in plan.table()
    assert "The head takes" in plan.table()
    # Every target pass also runs the head, so there is no draft prefill program.
    shapes = Shapes(config, SpeculationPolicy(config.speculative))
    assert not shapes.draft_prefills
    assert len(shapes.all()) <= 12
    assert not any(shape.is_draft_prefill for shape in shapes.all())
