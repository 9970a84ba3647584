"""Methods are described only in their table: no other module names them."""

import ast
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config.methods import METHODS, Method, with_draft_model
from jaxspec.config.speculation import SpeculativeConfig
from jaxspec.engine.speculative_args import merge_speculative_arguments
from jaxspec.errors import ConfigError
from jaxspec.program.propose import PROPOSERS
from jaxspec_checkpoints.heads import KINDS

SOURCES = Path(__file__).parents[2] / "jaxspec"
TREE = "[(0,), (1,), (0, 0), (1, 0)]"


def test_a_new_method_is_one_row(monkeypatch: pytest.MonkeyPatch):
    keys: dict[str, Any] = {"method": "hydra", "model": "h"}
    row = Method(weights="head", max_draft_tokens=11, extends_side_branches=False)
    monkeypatch.setitem(METHODS, "hydra", row)
    assert merge_speculative_arguments({"speculative_config": keys}) == keys
    config = SpeculativeConfig(**keys, num_speculative_tokens=11)
    assert config.method_info is row
    with pytest.raises(ConfigError, match="from 1 to 11, got 12.*method 'hydra'"):
        SpeculativeConfig(**keys, num_speculative_tokens=12)
    with pytest.raises(NotImplementedError, match="with leaves for method"):
        SpeculativeConfig(**keys, num_speculative_tokens=4, speculative_token_tree=TREE)
    with pytest.raises(ConfigError, match="model must be a folder for method 'hydra'"):
        SpeculativeConfig(method="hydra")
    with pytest.raises(NotImplementedError, match="'draft_model' or 'hydra', got 'x'"):
        SpeculativeConfig(method="x")


def test_every_part_of_a_method_has_a_proposer():
    parts = {part for name in METHODS for part in name.split("+")}
    assert parts == set(PROPOSERS)
    for name, row in METHODS.items():
        if not row.weights:
            assert METHODS[with_draft_model(name)].lookup == row.lookup
    heads = [name for name, row in METHODS.items() if row.has_head]
    assert tuple(heads) == KINDS


def test_only_the_table_names_methods():
    # Modules that may name methods: a registry of classes, commands of `jaxspec.train`,
    # vLLM's spellings, and a field of OpenAI's API called "suffix".
    others = {"program/propose/__init__.py", "train/__main__.py", "train/run.py"}
    others |= {"engine/speculative_args.py", "serve/requests/params.py"}
    found = set()
    for path in SOURCES.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if any(f'"{name}"' in text for name in METHODS):
            strings = {
                node.value
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
            if strings & set(METHODS):
                found.add(path.relative_to(SOURCES).as_posix())
    assert found == {"config/methods.py"} | others
