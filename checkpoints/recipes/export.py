"""Writes the pair as HuggingFace folders: bf16 weights, configuration, tokenizer."""

import csv
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import decode
import jax.numpy as jnp
import ml_dtypes
import network
import numpy as np
import transformers
from safetensors.numpy import load_file, save_file

from jaxspec_checkpoints.heads import KINDS

# Gemma's turn format, as training used it: no system role, the model answers the user.
CHAT_TEMPLATE = """\
{{ bos_token }}\
{%- for message in messages %}
{%- if message['role'] not in ('user', 'assistant', 'model') %}
{{- raise_exception('roles are user and assistant, not ' + message['role']) }}
{%- endif %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('user and assistant take turns, and the user begins') }}
{%- endif %}
{%- set role = 'user' if message['role'] == 'user' else 'model' %}
{{- '<start_of_turn>' + role + '\\n' }}
{{- message['content'] | trim }}
{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<start_of_turn>model\\n' }}
{%- endif %}"""

GENERATION_CONFIG = {
    "bos_token_id": 2,
    "eos_token_id": [1, 107],
    "pad_token_id": 0,
    "do_sample": True,
    "temperature": 1.0,
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "GemmaTokenizer",
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"],
    "clean_up_tokenization_spaces": False,
    "spaces_between_special_tokens": False,
    "chat_template": CHAT_TEMPLATE,
}


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_model(
    folder: Path, params: network.Params, config: dict[str, Any], tokenizer: Path
) -> None:
    """Write one HuggingFace folder that `Gemma2ForCausalLM` loads."""
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(folder, params)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", GENERATION_CONFIG)
    write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
    shutil.copyfile(tokenizer, folder / "tokenizer.model")
    write_tokenizer_json(folder)


def save_weights(folder: Path, params: network.Params) -> None:
    weights = {
        name: np.ascontiguousarray(np.asarray(value).astype(ml_dtypes.bfloat16))
        for name, value in params.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # Safetensors makes the file readable by its owner only.
    (folder / "model.safetensors").chmod(0o644)


def write_tokenizer_json(folder: Path) -> None:
    """Write `tokenizer.json` as well, for readers without sentencepiece."""
    path = folder / "tokenizer.json"
    path.unlink(missing_ok=True)  # it would be read in place of tokenizer.model
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.save(str(path), pretty=False)


def read_model(folder: Path) -> tuple[network.Params, dict[str, Any]]:
    """Return the weights as `decode.narrow` leaves them, and the configuration."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return decode.narrow(read_weights(folder)), config


def read_weights(folder: Path) -> network.Params:
    """Return the weights in float32, as training takes them."""
    weights = load_file(folder / "model.safetensors")
    return {name: jnp.asarray(value, jnp.float32) for name, value in weights.items()}


def write_credits(attribution: Path, path: Path) -> None:
    """Write the title, author and source of every CC BY story in the training text."""
    with attribution.open(encoding="utf-8", newline="") as lines:
        stories = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    written = ["title\tcredit\tsource"]
    for repository, _, title, notes in stories:
        credits = [
            note.strip().removeprefix("* ")
            for note in notes.split(" | ")
            if not note.startswith(("* License", "* Illustration", "* Language"))
        ]
        written.append(f"{title}\t{'; '.join(credits)}\t{repository}")
    path.write_text("\n".join(written) + "\n", encoding="utf-8")


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of models and heads, by relative path."""
    names = ("target", "draft", *KINDS)
    paths = sorted(path for name in names for path in folder.glob(f"{name}/*"))
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
    }
