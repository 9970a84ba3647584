"""Selects the tokens of a draft model's trimmed vocabulary.

`jaxspec_checkpoints.trimming` reads the maps; `jaxspec.models.trimmed` trims the head.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from jaxspec.config.model import ModelConfig
from jaxspec.config.speculation import SpeculativeConfig
from jaxspec.errors import ConfigError, check_integer
from jaxspec_checkpoints import CheckpointError, model_files
from jaxspec_checkpoints.checkpoint import TOKEN_MAP
from jaxspec_checkpoints.trimming import read_token_map

# Default number of tokens kept, if the vocabulary is larger and the draft has a map.
DEFAULT_SIZE = 32_768
_SIZE, _MAP = "draft_vocab_size", "draft_token_map"
_WAY_OUT = "`python -m jaxspec_checkpoints trim` writes one from texts"


def kept_tokens(
    speculative: SpeculativeConfig,
    target: ModelConfig,
    draft: ModelConfig,
    *,
    is_dummy: bool,
) -> tuple[int, ...] | None:
    """Return the ascending ids that a draft model may propose; None for all.

    By default, a vocabulary larger than `DEFAULT_SIZE` keeps the first `DEFAULT_SIZE`
    ids of the map in the draft's folder. A smaller one, or one without a map,
    keeps all ids.

    Args:
        is_dummy: Whether weights are random. If so, the first tokens are kept if there
            is no map.

    Raises:
        ConfigError: The map is missing, wrong or too short, or the kept tokens lack a
            special token of the models.
    """
    is_default = not speculative.is_trimmed
    if is_default and draft.vocab_size <= DEFAULT_SIZE:
        return None
    special = _special_tokens(target) | _special_tokens(draft)
    size, vocab_size = speculative.draft_vocab_size, draft.vocab_size
    if size is not None:
        check_integer(
            ConfigError,
            _SIZE,
            size,
            low=1,
            high=vocab_size,
            hint=f"The draft model has {vocab_size} tokens.",
        )
    if size == vocab_size:
        return None
    ranked = _ranked(speculative, vocab_size)
    if is_default:
        if ranked is None:
            return None
        size = min(DEFAULT_SIZE, len(ranked))
    if ranked is None:
        if not is_dummy:
            raise ConfigError(
                f"{_SIZE}={size} needs to know which tokens are frequent: "
                f"{speculative.model} has no {TOKEN_MAP}. {_WAY_OUT}; put it there, or "
                f"name it as {_MAP}.",
                parameter=_SIZE,
                value=size,
            )
        ranked = list(dict.fromkeys([*special.values(), *range(vocab_size)]))
    if size is None:
        size = len(ranked)
        if size >= vocab_size:
            raise ConfigError(
                f"{_MAP}={speculative.draft_token_map!r} lists all {vocab_size} "
                f"tokens of the draft model: set {_SIZE} to the number of tokens to "
                "keep.",
                parameter=_SIZE,
            )
    if size > len(ranked):
        raise ConfigError(
            f"{_SIZE} must be an integer from 1 to {len(ranked)}, got {size}: its "
            f"token map lists no more tokens. {_WAY_OUT}.",
            parameter=_SIZE,
            value=size,
        )
    kept = tuple(sorted(ranked[:size]))
    check_special_tokens(kept, special)
    return kept


def check_special_tokens(kept: Collection[int], special: Mapping[str, int]) -> None:
    """Reject a trimmed vocabulary without all special tokens.

    Args:
        special: Ids of special tokens by name.

    Raises:
        ConfigError: Names all missing tokens.
    """
    known = set(kept)
    missing = [
        f"{name} ({token})" for name, token in special.items() if token not in known
    ]
    if missing:
        raise ConfigError(
            f"A trimmed vocabulary of {len(known)} tokens must have the special ones; "
            f"missing: {', '.join(missing)}. {_WAY_OUT}, with those first; or raise "
            f"{_SIZE}.",
            parameter=_MAP,
        )


def _special_tokens(model: ModelConfig) -> dict[str, int]:
    ends = {f"eos_token_id {token}": token for token in model.eos_token_ids}
    named = {name: getattr(model, name) for name in ("pad_token_id", "bos_token_id")}
    return named | ends


def _ranked(speculative: SpeculativeConfig, vocab_size: int) -> list[int] | None:
    """Return the ids of the map, in its order; None without a map."""
    path: str | Path | None = speculative.draft_token_map
    assert speculative.model is not None
    try:
        if path is None:
            path = model_files(speculative.model).get(TOKEN_MAP)
        return None if path is None else read_token_map(path, vocab_size)
    except CheckpointError as error:
        message = f"{_MAP}: {error}."
        raise ConfigError(message, parameter=_MAP, value=str(path)) from error
