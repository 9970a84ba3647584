"""Loads the tokenizer, the weights and the runner; implements sleep and wake-up."""

import atexit
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, no_type_check

from jaxspec.config.engine import EngineConfig, draft_hint
from jaxspec.config.trimming import check_special_tokens
from jaxspec.engine.memory.malloc import large_arrays_mapped, permit_spare_arenas
from jaxspec.engine.memory.probe import fit, own_memory, spread_draft
from jaxspec.engine.multihost.channel import Followers, Leader
from jaxspec.engine.multihost.facts import facts_of
from jaxspec.engine.program_cache import ProgramCache, facts
from jaxspec.engine.program_folder import check_readable, folder_at
from jaxspec.engine.runner import (
    Runner,
    build_mesh,
    choose_dtype,
    join,
    resolve_dtype,
)
from jaxspec.errors import (
    ConfigError,
    RequestError,
    check_choice,
    check_integer,
    wrong_argument,
)
from jaxspec.jax_settings import own_settings
from jaxspec.models.families import family_of, layouts
from jaxspec.models.heads.weights import load_head, random_head
from jaxspec.models.params import Params
from jaxspec.models.weights import load_params, random_params
from jaxspec.sharding import DRAFT_MESH_AXES, Mesh
from jaxspec.text.tokenizer import NoTokenizer, Tokenizer, check_same_tokenizer
from jaxspec_checkpoints import CheckpointError, Tensor, model_files, open_checkpoint
from jaxspec_checkpoints.gguf.file import forget_headers, read_gguf
from jaxspec_checkpoints.gguf.tokenizer import has_tokenizer
from jaxspec_checkpoints.layout import EMBEDDING, HEAD
from jaxspec_checkpoints.reading import GGUF

_log = logging.getLogger(__name__)

_TOKENIZER_FILES = {"tokenizer.model", "tokenizer.json"}
# Maps vLLM's names of load formats to formats of checkpoints.
_LOAD_FORMATS = {
    "auto": ("hf", "kaggle", "orbax", "gguf"),
    "safetensors": ("hf",),
    "orbax": ("kaggle", "orbax"),
    "gguf": ("gguf",),
}
# Fields of the configuration that the leader decides for all hosts.
_DECIDED = ("dtype", "max_num_seqs", "max_num_batched_tokens", "num_pages")
_DRAFT_DEVICES = "draft_tensor_parallel_size"
_PARTS: tuple[str, ...] = ("weights", "kv_cache")


def read_tokenizer(config: EngineConfig) -> Tokenizer:
    """Read the target's tokenizer, and check that the draft's is the same one.

    Returns:
        A `NoTokenizer` with `skip_tokenizer_init`, or if weights are random and their
        folder has no tokenizer.

    Raises:
        ConfigError: A tokenizer cannot be read, they differ, or a trimmed draft lacks
            special tokens.
    """
    if config.skip_tokenizer_init:
        return NoTokenizer("skip_tokenizer_init=True")
    is_own = config.tokenizer == config.model
    if _is_dummy(config) and is_own and not _has_tokenizer(config.tokenizer):
        reason = f"{config.model} has no tokenizer file"
        _log.warning("%s: prompts must be token ids, and outputs have no text", reason)
        return NoTokenizer(reason)
    turns = family_of(config.model_config).turns
    tokenizer = Tokenizer.from_folder(config.tokenizer, config.chat_template, turns)
    folder = config.speculative and config.speculative.model
    # A draft without a tokenizer uses the target's. Tokenizers are compared before
    # sizes, because both configurations of a pair have the smaller vocabulary.
    if folder is not None and _has_tokenizer(folder):
        names = f"the target ({config.model})", f"the draft ({folder})"
        hint = draft_hint(config.model_config)
        check_same_tokenizer(tokenizer, Tokenizer.from_folder(folder), hint, names)
    num_rows = config.model_config.vocab_size
    if tokenizer.vocab_size > num_rows:
        raise ConfigError(
            f"The tokenizer of {config.tokenizer} has {tokenizer.vocab_size} pieces, "
            f"but {config.model} has vocab_size={num_rows}: they do not belong "
            "together. Pass the model's own tokenizer.",
            parameter="tokenizer",
            value=config.tokenizer,
        )
    if config.draft_token_ids is not None:
        check_special_tokens(config.draft_token_ids, tokenizer.special_tokens)
    return tokenizer


def _has_tokenizer(folder: str) -> bool:
    files = model_files(folder)
    if _TOKENIZER_FILES & files.keys():
        return True
    return GGUF in files and has_tokenizer(read_gguf(files[GGUF]))


def make_runner(config: EngineConfig) -> Runner:
    """Load both models onto the mesh of the configuration.

    With several hosts, wait for the other processes, and send them the sizes that are
    decided here.

    Returns:
        A runner whose `config` has planned sizes for those that the user left open.

    Raises:
        ConfigError: The models do not fit on the devices (raised before weights are
            read); a checkpoint is incomplete or damaged; or a process is missing or
            differs.
    """
    permit_spare_arenas()
    hosts, followers = config.hosts, None
    if hosts is not None:
        if hosts.is_follower:
            raise ConfigError(
                f"node_rank={hosts.node_rank} is a follower, which has no engine of "
                "its own: start it with `python -m jaxspec.serve --headless` and "
                "the same arguments.",
                parameter="node_rank",
                value=hosts.node_rank,
            )
        followers = Followers.gather(hosts, facts_of(config, facts()))
        try:
            join(hosts)
            return _make_leading(config, followers)
        except BaseException as error:
            followers.break_off(f"The leader could not start: {error!r}")
            raise
    return _make_leading(config, None)


def _make_leading(config: EngineConfig, followers: Followers | None) -> Runner:
    """Choose batch size and pages, send them to the followers, and load the models."""
    _warn_of_dummies(config)
    mesh, others = build_mesh(config), []
    if followers is not None:
        answers = followers.wait(followers.send("report_memory", {}))
        others = [(one["limit_bytes"], one["used_bytes"]) for one in answers]
    config, mesh, sharding = spread_draft(config, mesh, others=others)
    config, plan = fit(config, mesh, others=others)
    if followers is not None:
        # The type that "auto" means depends on the host's CPU, so the leader resolves
        # it for all hosts.
        dtype = str(resolve_dtype(config.dtype, mesh))
        config = dataclasses.replace(config, dtype=dtype)
        followers.send("load", _decided(config))
    plan = dataclasses.replace(plan, draft_sharding=sharding)
    _log.info("%s", plan.table())
    _log.info("%s", config.kept_tokens)
    if config.head_config is not None and config.speculative is not None:
        _log.info(
            "Drafts: %s in %s",
            config.head_config.describe(),
            config.speculative.model,
        )
    runner = _load(config, mesh, followers)
    runner.memory = plan
    if followers is not None:
        # For scripts that exit without `shutdown`.
        atexit.register(runner.leave)
    return runner


def _load(config: EngineConfig, mesh: Mesh, followers: Followers | None) -> Runner:
    place = config.compilation_cache_dir
    folder = None if place is None else folder_at(place)
    if folder is not None:
        check_readable(folder)
    with large_arrays_mapped():
        runner = Runner(config, mesh, *load_weights(config, mesh), followers)
    runner.cache = ProgramCache(folder)
    return runner


def _decided(config: EngineConfig) -> dict[str, Any]:
    """Return the leader's decisions; `make_following_runner` applies them."""
    values = {name: getattr(config, name) for name in _DECIDED}
    if config.speculative is not None:
        devices = config.speculative.draft_tensor_parallel_size
        values[_DRAFT_DEVICES] = devices
    return values


def make_following_runner(config: EngineConfig, leader: Leader) -> Runner:
    """Load both models' parts for this host's devices, as the leader has decided.

    Raises:
        ConfigError: A checkpoint is incomplete or damaged, or devices do not fit.
    """
    assert config.hosts is not None
    permit_spare_arenas()
    join(config.hosts)
    mesh = build_mesh(config)
    command = leader.receive()
    assert command.name == "report_memory", command
    limit, used = own_memory(config, mesh)
    leader.answer(command, {"limit_bytes": limit, "used_bytes": used})
    command = leader.receive()
    assert command.name == "load", command
    decided = dict(command.values)
    devices = decided.pop(_DRAFT_DEVICES, None)
    if config.speculative is not None:
        decided["speculative"] = dataclasses.replace(
            config.speculative, draft_tensor_parallel_size=devices
        )
    config = dataclasses.replace(config, **decided)
    return _load(config, build_mesh(config), None)


def _warn_of_dummies(config: EngineConfig) -> None:
    if _is_dummy(config):
        _log.warning("load_format='dummy': weights are random, texts are meaningless")
    if config.speculative is not None and config.is_synthetic:
        _log.warning(
            "rejection_sample_method='synthetic': drafts are accepted at random, and "
            "texts are meaningless. Acceptance probabilities by position: %s.",
            config.speculative.forced_acceptance,
        )


def _is_dummy(config: EngineConfig) -> bool:
    return config.load_format == "dummy"


@own_settings()
def load_weights(config: EngineConfig, mesh: Mesh) -> tuple[Params, Params | None]:
    """Read the weights of target and draft, or make random ones (`load_format`).

    Raises:
        ConfigError: A checkpoint is incomplete or damaged.
    """
    dtype = choose_dtype(config.dtype, mesh)
    if _is_dummy(config):
        return _random_weights(config, mesh, dtype)
    try:
        return _read_weights(config, mesh, dtype)
    finally:
        forget_headers()


def _read_weights(
    config: EngineConfig, mesh: Mesh, dtype: Any
) -> tuple[Params, Params | None]:
    # Open both before reading either: an error in the draft must not cost minutes.
    tensors = _open(config, config.model, "model")
    draft_tensors = None
    folder = config.speculative and config.speculative.model
    if folder is not None and config.head_config is None:
        draft_tensors = _open(config, folder, "speculative_model")
    draft = None
    if folder is not None and config.head_config is not None:
        # Heads are small, and checked while they are read, so they come first.
        _, draft = load_head(
            folder,
            config.model_config,
            dtype=dtype,
            mesh=mesh,
            target_name=config.model,
        )
    try:
        target = load_params(
            config.model_config,
            tensors,
            dtype=dtype,
            mesh=mesh,
            progress="Loading target",
        )
        if config.draft_model_config is not None and draft_tensors is not None:
            draft = load_params(
                config.draft_model_config,
                draft_tensors,
                dtype=dtype,
                mesh=mesh,
                mesh_axes=DRAFT_MESH_AXES,
                token_ids=config.draft_token_ids,
                progress="Loading draft",
            )
    except CheckpointError as error:
        raise ConfigError(str(error), parameter="model") from error
    return target, draft


def _random_weights(
    config: EngineConfig, mesh: Mesh, dtype: Any
) -> tuple[Params, Params | None]:
    options: dict[str, Any] = dict(dtype=dtype, mesh=mesh)
    target = random_params(config.model_config, seed=config.seed, **options)
    if config.head_config is not None:
        return target, random_head(config.head_config, seed=config.seed, **options)
    if config.draft_model_config is None:
        return target, None
    # Another seed: with the same sizes and seed, the draft would equal the target.
    options |= dict(seed=config.seed ^ 1, mesh_axes=DRAFT_MESH_AXES)
    options |= dict(token_ids=config.draft_token_ids)
    return target, random_params(config.draft_model_config, **options)


def _open(config: EngineConfig, folder: str, argument: str) -> Mapping[str, Tensor]:
    try:
        checkpoint = open_checkpoint(folder, layouts()).resolved()
    except CheckpointError as error:
        # Name the argument: otherwise the message would not say whether the target or
        # the draft is meant.
        message = f"{argument}: {error}"
        raise ConfigError(message, parameter=argument, value=folder) from error
    load_format = config.load_format
    if checkpoint.format not in _LOAD_FORMATS[load_format]:
        allowed = f"'auto' for {folder}, which has format {checkpoint.format!r},"
        raise wrong_argument(ConfigError, "load_format", allowed, load_format)
    # Leave out padding rows that the other model of the pair does not have.
    num_rows = config.model_config.vocab_size
    tensors = dict(checkpoint.tensors)
    for name in {EMBEDDING, HEAD} & tensors.keys():
        if tensors[name].shape[0] > num_rows:
            tensors[name] = tensors[name].head(num_rows)
    return tensors


def check_level(level: int) -> int:
    """Return a sleep level; raise `RequestError` if it is not 1 or 2."""
    return check_integer(RequestError, "level", level, low=1, high=2)


class Sleep:
    """Sleep and wake-up of a runner: which parts are off the devices.

    Attributes:
        level: 0 awake; 1 asleep, weights on the host; 2 asleep, weights dropped.
    """

    def __init__(self, config: EngineConfig, runner: Runner):
        self._config, self._runner = config, runner
        self._asleep: set[str] = set()
        self.level = 0

    def begin(self, level: int) -> None:
        """Free weights and pages; do nothing if the engine sleeps already.

        Raises:
            RequestError: The level is neither 1 nor 2.
        """
        level = check_level(level)
        if self._asleep:
            return
        with self._runner.together("sleep", {"level": level}):
            self._runner.drop_pages()
            self._runner.drop_weights(keep=level == 1)
        self._asleep, self.level = set(_PARTS), level

    @no_type_check  # it has its own check, with a better error
    def end(self, tags: list[str] | None) -> None:
        """Restore the parts named in `tags`, or (None) all missing parts.

        Raises:
            RequestError: A tag is unknown.
        """
        wanted = _PARTS if tags is None else tags
        if not isinstance(wanted, (list, tuple)):
            allowed = "a list of 'weights' and 'kv_cache', or None for both"
            raise wrong_argument(RequestError, "tags", allowed, tags)
        for tag in wanted:
            check_choice(RequestError, "tags", tag, _PARTS)
        with self._runner.together("wake_up", {"tags": list(wanted)}):
            if "weights" in self._asleep.intersection(wanted):
                again = None if self.level == 1 else self._read_again()
                self._runner.restore_weights(again)
            if "kv_cache" in self._asleep.intersection(wanted):
                self._runner.restore_pages()
        self._asleep.difference_update(wanted)
        if not self._asleep:
            self.level = 0

    def _read_again(self) -> tuple[Params, Params | None]:
        config = self._config
        if not self._runner.program.proposers:
            # No drafts, or drafting has stopped after a failed launch.
            config = dataclasses.replace(
                config,
                draft_model_config=None,
                head_config=None,
                draft_token_ids=None,
                speculative=None,
            )
        with large_arrays_mapped():
            return load_weights(config, self._runner.mesh)
