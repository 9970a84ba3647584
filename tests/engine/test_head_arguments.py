"""Engine arguments of heads: values read from a head's folder, and rejected values."""

import json
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
    Eagle3Config,
    EagleConfig,
    MedusaConfig,
)
from jaxspec.models.heads.weights import save_head
from jaxspec.sharding import make_mesh
from tests.support import heads
from tests.support.model_configs import TINY, write_model

VOCAB, HIDDEN = TINY["vocab_size"], TINY["hidden_size"]
SIZES: dict[str, Any] = dict(
    target_hidden_size=HIDDEN, vocab_size=VOCAB, draft_vocab_size=VOCAB
)
LAYER: dict[str, Any] = dict(
    draft_vocab_size=96,
    hidden_size=HIDDEN,
    intermediate_size=64,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    target_layers=(1, 2, 3),
)
EAGLE3: Any = Eagle3Config(**SIZES | LAYER)
CONFIGS: dict[str, Any] = {
    "eagle": EagleConfig(
        **SIZES
        | {name: one for name, one in LAYER.items() if name != "target_layers"}
        | dict(draft_vocab_size=VOCAB)
    ),
    "eagle3": EAGLE3,
    "medusa": MedusaConfig(**SIZES, num_heads=3),
}

NAMES: dict[str, Any] = {"target_name": "tiny", "architecture": "Gemma2ForCausalLM"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write a target and a head of each kind."""
    root = tmp_path_factory.mktemp("heads")
    found = {"target": write_model(root / "target")}
    for kind, config in CONFIGS.items():
        params = heads.random_params(config)
        dtype = jnp.dtype(jnp.float32)
        save_head(
            root / kind,
            config,
            params,
            dtype=dtype,
            **NAMES,
        )
        found[kind] = str(root / kind)
    return found


def configure(
    folders: dict[str, str], kind: str, target: str | None = None, **keys: Any
) -> EngineConfig:
    given = {"method": kind, "model": folders.get(kind), **keys}
    return EngineArgs(
        model=target or folders["target"],
        dtype="float32",
        max_model_len=256,
        speculative_config={name: one for name, one in given.items() if one},
    ).create_engine_config()


@pytest.mark.parametrize("kind", CONFIGS)
def test_kind_and_sizes_of_a_head_are_read_from_its_folder(folders, kind):
    config = configure(folders, kind, num_speculative_tokens=2)
    assert config.head_config == CONFIGS[kind]
    assert config.draft_model_config is None
    assert config.speculative is not None
    assert config.speculative.method == kind
    assert config.speculative.model == folders[kind]
    assert config.num_draft_tokens == 2
    # The kind of head is read from the folder, as in vLLM.
    found = configure(
        folders, kind, method=None, model=folders[kind], num_speculative_tokens=2
    )
    assert found == config
    with pytest.warns(UserWarning, match="num_speculative_tokens is not given"):
        config = configure(folders, kind)
    most = CONFIGS[kind].max_drafts
    assert config.num_draft_tokens == (5 if most is None else most)


def test_rejects_more_drafts_than_the_head_supports(folders):
    kind = "medusa"
    most = CONFIGS[kind].max_drafts
    with pytest.raises(ConfigError) as caught:
        configure(folders, kind, num_speculative_tokens=most + 1)
    assert caught.value.parameter == "num_speculative_tokens"
    for text in (f"1 to {most}, got {most + 1}", kind, f"at most {most} tokens"):
        assert text in str(caught.value)


def test_rejects_tree_deeper_than_medusas_heads(folders):
    tree = str([(0,) * level for level in range(1, 5)])
    with pytest.raises(ConfigError, match="a tree of at most 3 levels") as caught:
        configure(folders, "medusa", speculative_token_tree=tree)
    assert caught.value.parameter == "speculative_token_tree"


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_rejects_tree_that_a_head_cannot_draft(folders, kind):
    tree = "[(0,), (1,), (0, 0), (1, 0)]"
    with pytest.raises(UnsupportedError, match=f"with leaves.*{kind}") as caught:
        configure(folders, kind, speculative_token_tree=tree)
    assert caught.value.parameter == "speculative_token_tree"
    leaves = "[(0,), (1,), (0, 0), (0, 1)]"
    assert configure(folders, kind, speculative_token_tree=leaves).num_draft_tokens == 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(hidden_size=80), "target_hidden_size=64, and .* has 80"),
        (dict(vocab_size=600), "vocab_size=512, and .* has 600"),
        (dict(num_hidden_layers=2), r"layer_ids=\[1, 2, 3\], and .* has 2 layers"),
    ],
)
def test_rejects_head_for_another_target(folders, tmp_path, changes, named):
    other = write_model(tmp_path / "other", **changes)
    with pytest.raises(ConfigError, match=f"for another target.*{named}"):
        configure(folders, "eagle3", other, num_speculative_tokens=2)


def test_rejects_folder_without_a_head(folders):
    """The folder has a model, another kind of head, or a head instead of a model."""
    options: dict[str, Any] = dict(num_speculative_tokens=2)
    with pytest.raises(ConfigError, match="method must be 'medusa', got 'eagle3'"):
        configure(folders, "eagle3", model=folders["medusa"], **options)
    message = (
        "holds no head .*'gemma2'.*small network on the hidden states of the target"
    )
    with pytest.raises(ConfigError, match=message) as caught:
        configure(folders, "eagle3", model=folders["target"], **options)
    assert caught.value.parameter == "speculative_model"
    message = "got 'medusa'.*from a head.*'eagle', 'eagle3', 'medusa'"
    with pytest.raises(ConfigError, match=message):
        configure(folders, "draft_model", model=folders["medusa"], **options)


@pytest.mark.parametrize("name", ["./nosuch", "someone/gemma2-eagle3"])
def test_missing_head_explains_the_sources_of_drafts(
    folders, name, tmp_path, monkeypatch
):
    """A missing folder, and a name on the Hugging Face Hub without a network."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        configure(folders, "eagle3", model=name, num_speculative_tokens=2)
    assert caught.value.parameter == "speculative_model"
    for text in (name, "from a head, which is a small network on the hidden states"):
        assert text in str(caught.value)


def test_config_file_is_sufficient_for_random_weights(folders, tmp_path):
    content = (Path(folders["eagle3"]) / "config.json").read_text()
    (tmp_path / "config.json").write_text(json.dumps(json.loads(content)))
    config = EngineArgs(
        model=folders["target"],
        load_format="dummy",
        speculative_config={
            "method": "eagle3",
            "model": str(tmp_path),
            "num_speculative_tokens": 3,
        },
    ).create_engine_config()
    assert config.head_config == EAGLE3
    mesh = make_mesh(1)
    _, made = loader.load_weights(config, mesh)
    program, (_, (form,), _) = describe(config, mesh)
    assert program.proposers[0].has_params
    shapes = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(form)]
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(made)] == shapes


@pytest.mark.parametrize("kind", CONFIGS)
def test_memory_plan_includes_a_head_and_its_pages(folders, kind):
    config = configure(folders, kind, num_speculative_tokens=2)
    mesh, head = build_mesh(config), CONFIGS[kind]
    facts = find_facts(config, mesh, GivenSizes())
    _, (_, (form,), _) = describe(config, mesh)
    # Apart from its parameters, a head adds one vector per row to the state.
    kept = 4 * HIDDEN * config.max_num_seqs
    assert facts.draft.weight_bytes == bytes_of(form) + kept
    assert facts.draft.page_bytes == head.kv_bytes_per_token(4) * config.page_size
    assert (facts.draft.page_bytes > 0) == (kind in ("eagle", "eagle3"))
    assert facts.programs.draft_vocab_size == VOCAB
    _, plan = fit(config, mesh)
    assert "draft weights" in plan.table()
    assert "The head takes" in plan.table()


@pytest.mark.parametrize("kind", CONFIGS)
def test_server_with_a_head_has_no_more_programs_than_with_a_draft_model(folders, kind):
    """Every target pass also runs the head, so there is no draft prefill program."""
    config = configure(folders, kind, num_speculative_tokens=2)
    shapes = Shapes(config, SpeculationPolicy(config.speculative))
    assert not shapes.draft_prefills
    assert len(shapes.all()) <= 12
    assert not any(shape.is_draft_prefill for shape in shapes.all())
