"""A whole training run: text, states, the loop, and the folder that an engine loads.

A work folder holds the text, the target's states if they are cached, and the trainer's
state, so that the same command resumes an interrupted run.
"""

import argparse
import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxspec.config.model import MASK_TOKEN
from jaxspec.engine.model_folders import model_folder
from jaxspec.engine.runner import choose_dtype
from jaxspec.errors import ConfigError, check_integer, check_number, wrong_argument
from jaxspec.jax_settings import find_devices, own_settings
from jaxspec.llm import LLM
from jaxspec.models.families import config_from_folder, config_from_hf, layouts
from jaxspec.models.heads.config import (
    DFlashConfig,
    Eagle3Config,
    EagleConfig,
    HeadConfig,
    MedusaConfig,
    default_layers,
)
from jaxspec.models.weights import load_params
from jaxspec.sharding import MESH_AXES
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.train.methods import (
    GGUF_FILE,
    SAFETENSORS,
    SPECFORGE,
    DFlashMethod,
    DraftMethod,
    Eagle3Method,
    EagleMethod,
    MedusaMethod,
    Method,
)
from jaxspec.train.target import StateFiles, Target, replace_text
from jaxspec.train.text import (
    Text,
    certain_rows,
    frequent_tokens,
    given_text,
    read_prompts,
    split_rows,
    write_text,
)
from jaxspec.train.texts import (
    SETTINGS,
    Texts,
    check_same,
    model_digest,
    open_texts,
    text_digest,
)
from jaxspec.train.trainer import ReadStates, Schedule, Trainer
from jaxspec_checkpoints import CheckpointError, open_checkpoint, read_config
from jaxspec_checkpoints.gguf.writing import model_metadata, tokenizer_metadata
from jaxspec_checkpoints.layout import TIE

_log = logging.getLogger(__name__)

# Options that may differ between a run and the run that resumes it.
_FREE = {"out", "work", "eval_every", "save_every", "export", "texts"}
# Default number of the target's tokens that a head can propose.
DRAFT_VOCAB = 32_000


@own_settings()
def run(options: argparse.Namespace) -> Trainer:
    """Train as the options say; return the trainer, at its last step.

    Raises:
        ConfigError: An option is invalid; nothing has been computed then.
    """
    out = Path(options.out)
    if out.exists():
        allowed = "a folder that does not exist yet"
        raise wrong_argument(ConfigError, "out", allowed, str(out))
    names = {field.name for field in dataclasses.fields(Schedule)}
    given = {name: value for name, value in vars(options).items() if name in names}
    schedule = Schedule(**given)
    for name, low in (("length", 8), ("tokens", 1), ("tensor_parallel_size", 1)):
        check_integer(ConfigError, name, getattr(options, name), low=low)
    if options.held_out_rows is not None:
        check_integer(ConfigError, "held_out_rows", options.held_out_rows, low=1)
    check_number(
        ConfigError, "held_out", options.held_out, low=0, high=0.5, open_low=True
    )
    folder = model_folder(options.target, "target")
    config = config_from_folder(folder)
    method = make_method(options, config, folder)
    tokenizer = Tokenizer.from_folder(str(folder))
    _check_export(options, method, folder)
    work = Path(options.work or f"{out}.work")
    settings = _settings(options, folder)
    texts = None
    if options.texts is not None:
        texts = open_texts(Path(options.texts))
        _check_texts(texts, settings["model"])
        settings["texts"] = texts.digest
    check_same(work / SETTINGS, settings, "a run")
    mesh, _ = _mesh_and_dtype(options)
    schedule.check_mesh(mesh)

    if texts is None:
        text = _text(options, folder, work, settings, tokenizer, schedule)
        trained, held_out = split_rows(text, options.held_out)
        states = work
    else:
        trained, held_out = texts.trained, _held_out_rows(texts, options.held_out_rows)
        states = texts.folder
        schedule.check_texts(trained, held_out, "write more texts")
        work.mkdir(parents=True, exist_ok=True)
        replace_text(work / SETTINGS, json.dumps(settings, indent=2) + "\n")
    _log.info(
        "%d rows of text, and %d held out; the loss uses %d tokens",
        *(len(trained), len(held_out), trained.num_written),
    )
    target = load_target(options, folder, config)
    token_ids, size = None, trimmed_size(method)
    if size is not None:
        special = [
            config.pad_token_id,
            config.bos_token_id,
            *config.eos_token_ids,
            *tokenizer.special_tokens.values(),
        ]
        token_ids = frequent_tokens(trained, size, config.vocab_size, special)
    trainer = Trainer(
        method,
        target,
        trained,
        held_out,
        schedule=schedule,
        read_states=(
            _states(options, target, method, trained, states, settings["model"]),
            _states(options, target, method, held_out, states, settings["model"]),
        ),
        token_ids=token_ids,
        work=work,
    )
    trainer.run()
    method.save(out, trainer.params, target, token_ids=token_ids, export=options.export)
    print(f"{options.method}: {trainer.step} steps, {out}")
    return trainer


def make_method(options: argparse.Namespace, config: Any, folder: Path) -> Method:
    """Make the method that the options name, with their sizes and the target's."""
    make = {
        "eagle": _eagle,
        "eagle3": _eagle3,
        "medusa": _medusa,
        "dflash": _dflash,
    }
    if options.method == "draft":
        return _draft(options, config, folder)
    if options.method == "pard":
        return _pard(options, config, folder)
    method = make[options.method](options, config)
    method.config.check_target(config)
    return method


def _common(config: Any, draft_vocab_size: int | None) -> dict[str, Any]:
    size = draft_vocab_size or min(DRAFT_VOCAB, config.vocab_size)
    return dict(
        target_hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        draft_vocab_size=size,
    )


def _layer(options: argparse.Namespace, config: Any) -> dict[str, Any]:
    """Return sizes of a head's decoder layer, from the options and the target."""
    return dict(
        hidden_size=config.hidden_size,
        intermediate_size=options.intermediate_size or config.intermediate_size,
        num_q_heads=config.num_q_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_theta,
        max_position_embeddings=config.max_position_embeddings,
    )


def _eagle(options: argparse.Namespace, config: Any) -> EagleMethod:
    common = _common(config, config.vocab_size)
    return EagleMethod(
        num_passes=check_integer(ConfigError, "passes", options.passes, low=1),
        config=EagleConfig(**common, **_layer(options, config)),
    )


def _eagle3(options: argparse.Namespace, config: Any) -> Eagle3Method:
    layers = options.layers or default_layers(config.num_layers)
    return Eagle3Method(
        num_passes=check_integer(ConfigError, "passes", options.passes, low=1),
        config=Eagle3Config(
            **_common(config, options.draft_vocab_size),
            **_layer(options, config),
            target_layers=tuple(layers),
        ),
    )


def _medusa(options: argparse.Namespace, config: Any) -> MedusaMethod:
    return MedusaMethod(
        config=MedusaConfig(
            **_common(config, config.vocab_size),
            num_heads=options.heads,
            num_blocks=options.blocks,
        )
    )


def _dflash(options: argparse.Namespace, config: Any) -> DFlashMethod:
    num_layers = options.num_hidden_layers
    check_integer(ConfigError, "num_hidden_layers", num_layers, low=1)
    vocab_size = options.draft_vocab_size or config.vocab_size
    return DFlashMethod(
        config=DFlashConfig(
            **_common(config, vocab_size),
            **_layer(options, config),
            target_layers=tuple(options.layers or default_layers(config.num_layers)),
            num_target_layers=config.num_layers,
            block_size=options.block_size,
            mask_token_id=_mask_token(options, config),
            windows=(None,) * num_layers,
            has_qk_norm=True,
            has_lm_head=vocab_size < config.vocab_size,
        )
    )


def _mask_token(options: argparse.Namespace, config: Any) -> int:
    """Return the mask token, by default one that occurs in no text."""
    mask = options.mask_token
    if mask is None:
        mask = config.pad_token_id
    last = config.vocab_size - 1
    return check_integer(ConfigError, "mask_token", mask, low=0, high=last)


# Sizes of a new draft model, by their names in a config.json.
_DRAFT_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


def _draft(options: argparse.Namespace, config: Any, folder: Path) -> DraftMethod:
    sizes = {name: getattr(options, name) for name in _DRAFT_SIZES}
    given = [name for name, size in sizes.items() if size is not None]
    sources = {"start": options.start, "keep_layers": options.keep_layers}
    named = [name for name, value in sources.items() if value is not None]
    if len(named) == 2 or (named and given):
        other = named[1] if len(named) == 2 else given[0]
        raise ConfigError(
            f"{other} and {named[0]} exclude each other: {named[0]} sets the sizes. "
            "Give one of them.",
            parameter=other,
            value=getattr(options, other),
        )
    if options.draft_vocab_size is not None and options.keep_layers is None:
        raise ConfigError(
            "draft_vocab_size needs keep_layers: only a draft that shares the target's "
            "output matrix is trained with a part of it.",
            parameter="draft_vocab_size",
            value=options.draft_vocab_size,
        )
    if options.keep_layers is not None:
        return _kept_layers(options, config, folder)
    if options.start is not None:
        return _started(options, config)
    missing = [name for name, size in sizes.items() if size is None]
    if missing:
        raise ConfigError(
            "A draft model needs start, an initial model, keep_layers, or its sizes: "
            f"{missing[0]} is not given.",
            parameter=missing[0],
        )
    check_integer(
        ConfigError, "hidden_size", options.hidden_size, low=1, high=config.hidden_size
    )
    content: Mapping[str, Any] = read_config(folder)[0]
    new = {key: value for key, value in content.items() if key != "layer_types"}
    # The new draft's embedding is projected from the target's, and also serves as the
    # draft's LM head.
    new |= sizes | {TIE: True}
    return DraftMethod(config=config_from_hf(new), hf_config=new)


def _started(options: argparse.Namespace, config: Any) -> DraftMethod:
    """Make a draft that starts as the model that the options name."""
    start = model_folder(options.start, "start")
    checkpoint = open_checkpoint(start, layouts()).resolved()
    found = config_from_folder(start)
    if found.vocab_size != config.vocab_size:
        raise ConfigError(
            f"start has vocab_size={found.vocab_size}, but the target has "
            f"{config.vocab_size}: a draft model needs the target's vocabulary.",
            parameter="start",
            value=options.start,
        )
    return DraftMethod(
        config=found, hf_config=checkpoint.config, start=checkpoint.tensors
    )


def _kept_layers(options: argparse.Namespace, config: Any, folder: Path) -> DraftMethod:
    """Make a draft that starts as some of the target's layers, with its embedding."""
    layers = options.keep_layers
    for layer in layers:
        check_integer(
            ConfigError, "keep_layers", layer, low=0, high=config.num_layers - 1
        )
    if list(layers) != sorted(set(layers)):
        allowed = "ascending numbers of layers, each once"
        raise wrong_argument(ConfigError, "keep_layers", allowed, list(layers))
    size = options.draft_vocab_size
    if size is not None:
        high = config.vocab_size
        check_integer(ConfigError, "draft_vocab_size", size, low=1, high=high)
    checkpoint = open_checkpoint(folder, layouts()).resolved()
    ignored = "sliding_window_pattern", "_sliding_window_pattern", "quantization_config"
    flat = checkpoint.layout.text_config(checkpoint.config)
    content = {name: value for name, value in flat.items() if name not in ignored}
    content["num_hidden_layers"] = len(layers)
    content["layer_types"] = [
        "full_attention" if config.window(layer) is None else "sliding_attention"
        for layer in layers
    ]
    number_of = {str(layer): str(number) for number, layer in enumerate(layers)}
    start: dict[str, Any] = {}
    for name, tensor in checkpoint.tensors.items():
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            if parts[2] not in number_of:
                continue
            parts[2] = number_of[parts[2]]
        start[".".join(parts)] = tensor
    return DraftMethod(
        config=config_from_hf(content),
        hf_config=content,
        start=start,
        is_embedding_shared=True,
        draft_vocab_size=None if size == config.vocab_size else size,
    )


def _pard(options: argparse.Namespace, config: Any, folder: Path) -> DraftMethod:
    """Make a draft model with a mask token."""
    draft, mask = _draft(options, config, folder), _mask_token(options, config)
    return dataclasses.replace(
        draft,
        config=dataclasses.replace(draft.config, mask_token_id=mask),
        hf_config={**draft.hf_config, MASK_TOKEN: mask},
        num_passes=check_integer(ConfigError, "passes", options.passes, low=2),
    )


def load_target(options: argparse.Namespace, folder: Path, config: Any) -> Target:
    """Load the target onto all devices, a copy per `tensor_parallel_size` devices.

    Raises:
        ConfigError: The number of devices is not a multiple of it.
    """
    mesh, dtype = _mesh_and_dtype(options)
    params = load_params(
        config,
        open_checkpoint(folder, layouts()).resolved().tensors,
        dtype=dtype,
        mesh=mesh,
        progress="Loading target",
        is_trained=True,
    )
    return Target(
        name=options.target,
        folder=folder,
        config=config,
        params=params,
        mesh=mesh,
        dtype=dtype,
    )


def _mesh_and_dtype(options: argparse.Namespace) -> tuple[Mesh, Any]:
    """Return the mesh and type of the target.

    Raises:
        ConfigError: The devices cannot be divided so, or do not support the type.
    """
    parts, devices = options.tensor_parallel_size, find_devices()
    if len(devices) % parts:
        allowed = f"a divisor of the {len(devices)} devices"
        raise wrong_argument(ConfigError, "tensor_parallel_size", allowed, parts)
    mesh = Mesh(np.array(devices).reshape(-1, 1, parts), MESH_AXES)
    return mesh, choose_dtype(options.dtype, mesh)


def trimmed_size(method: Method) -> int | None:
    """Return the size of a method's trimmed vocabulary; None if it has all tokens."""
    if isinstance(method, DraftMethod):
        return method.draft_vocab_size
    config: Any = getattr(method, "config", None)
    is_trimmed = isinstance(config, HeadConfig) and config.is_trimmed
    return config.draft_vocab_size if is_trimmed else None


def _check_export(options: argparse.Namespace, method: Method, folder: Path) -> None:
    """Reject a format that the trained model does not have.

    Raises:
        ConfigError: It would be found only after training otherwise.
    """
    reason = None
    if options.export == SPECFORGE:
        if isinstance(method, Eagle3Method):
            method.config.to_specforge()
        else:
            reason = "only EAGLE-3 heads are written in SpecForge's form"
    elif options.export == GGUF_FILE:
        reason = _without_gguf(method, folder)
    if reason is not None:
        raise ConfigError(
            f"export must be {SAFETENSORS!r} here, got {options.export!r}: {reason}.",
            parameter="export",
            value=options.export,
        )


def _without_gguf(method: Method, folder: Path) -> str | None:
    """Return why a trained model has no GGUF form; None if it has one."""
    if not isinstance(method, DraftMethod):
        return "heads have no GGUF form that jaxspec reads"
    if method.num_passes > 1:
        return "GGUF has no key for the mask token of a parallel draft"
    try:
        model_metadata(method.hf_config)
        tokenizer_metadata(folder)
    except CheckpointError as error:
        return str(error)
    return None


def _check_texts(texts: Texts, model: str) -> None:
    if texts.settings["target"] != model:
        raise ConfigError(
            f"{texts.folder} holds texts of {texts.settings['target_name']}, whose "
            "files differ from the target's: let this target write its own texts.",
            parameter="texts",
            value=str(texts.folder),
        )


def _held_out_rows(texts: Texts, count: int | None) -> Text:
    """Return the first `count` held-out rows; None: all of them."""
    if count is None:
        return texts.held_out
    check_integer(ConfigError, "held_out_rows", count, low=1, high=len(texts.held_out))
    return texts.held_out.rows(slice(count))


def _text(
    options: argparse.Namespace,
    folder: Path,
    work: Path,
    settings: Mapping[str, Any],
    tokenizer: Tokenizer,
    schedule: Schedule,
) -> Text:
    """Load the work folder's text; if it has none, make and save text and settings.

    Raises:
        ConfigError: The text to train on or the held-out text may have fewer rows than
            a step takes. The target has written nothing then.
    """
    path = work / "text.npz"
    if path.exists():
        return Text.load(path)
    prompts = read_prompts(
        Path(options.data), tokenizer, length=options.length, seed=options.seed
    )
    if options.text == "given":
        count = -(-options.tokens // options.length)
        text = given_text(prompts[:count], options.length)
    else:
        text = certain_rows(prompts, length=options.length, num_tokens=options.tokens)
    parts = split_rows(text, options.held_out)
    schedule.check_texts(*parts, "raise tokens or held_out, give more documents")
    if options.text == "written":
        with LLM(
            str(folder),
            dtype=options.dtype,
            max_model_len=options.length,
            max_num_seqs=options.max_num_seqs,
            tensor_parallel_size=options.tensor_parallel_size,
        ) as llm:
            text = write_text(
                llm,
                prompts,
                length=options.length,
                num_tokens=options.tokens,
                seed=options.seed,
            )
    # Settings are saved only now, so that a run that failed before this point can be
    # repeated with other settings.
    work.mkdir(parents=True, exist_ok=True)
    replace_text(work / SETTINGS, json.dumps(settings, indent=2) + "\n")
    text.save(path)
    return text


def _states(
    options: argparse.Namespace,
    target: Target,
    method: Method,
    text: Text,
    folder: Path,
    model: str,
) -> ReadStates:
    """Return the reader of a text's states, which may be cached in a folder."""
    if options.states == "cached":
        files = StateFiles(folder, target, method.layers, text_digest(text), model)
        files.fill(text.tokens, options.rows)
        return lambda numbers, tokens: files.read(numbers)
    read = target.reader(method.layers)
    return lambda numbers, tokens: read(tokens)


def _settings(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return what a resumed run must match: options, and digests of the models."""
    given = {name: value for name, value in vars(options).items() if name not in _FREE}
    given["model"] = model_digest(folder)
    if getattr(options, "start", None) is not None:
        given["start_model"] = model_digest(model_folder(options.start, "start"))
    return json.loads(json.dumps(given))
