"""Finds the facts of a memory plan, and applies the planned sizes to a configuration.

Nothing is loaded, run or profiled: bytes of weights and pages follow from shapes and
placements. The limit comes from the device or, for devices known by name only, from
`device_descriptions`.
"""

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec.config.engine import EngineConfig, GivenSizes, ModelConfig
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.memory.device_descriptions import (
    describe,
    describe_mesh,
    named_limit,
    named_mesh,
)
from jaxspec.engine.memory.draft_sharding import (
    DraftSharding,
    choose,
    estimate,
    speeds_of,
)
from jaxspec.engine.memory.plan import (
    ACCELERATOR_SIZES,
    CPU_SIZES,
    DEFAULT_UTILIZATION,
    MIB,
    LocalPages,
    MemoryFacts,
    MemoryPlan,
    ModelBytes,
    ProgramFacts,
    plan_memory,
)
from jaxspec.engine.memory.round_cost import CONTEXT, PassCost, RoundCost
from jaxspec.engine.model_folders import BUNDLED_NAMES
from jaxspec.engine.runner import (
    build_mesh,
    most_pool_share,
    options_of,
    pool_of,
    pool_share,
    resolve_dtype,
)
from jaxspec.engine.scheduling.programs import Shapes
from jaxspec.engine.speculation.policy import SpeculationPolicy
from jaxspec.errors import ConfigError, UnsupportedError
from jaxspec.models.families import published_config
from jaxspec.models.heads.weights import abstract_head
from jaxspec.models.params import Params
from jaxspec.models.trimmed import EMBEDDING, HEAD
from jaxspec.models.weights import abstract_params
from jaxspec.program.plan import PoolShape
from jaxspec.program.propose import proposers_of
from jaxspec.program.state import page_forms
from jaxspec.program.step import lower_step
from jaxspec.sharding import (
    DRAFT_MESH_AXES,
    TARGET_MESH_AXES,
    make_mesh,
    num_parts,
)
from jaxspec_checkpoints.quantization import stored_bytes

# Results of `own_memory` in the other processes.
Others = Sequence[tuple[int | None, int]]

# Prefetched weights and small arrays. Beyond logits and distributions, they take up to
# 202 MB in `benchmarks/results/aot*.json`. XLA:CPU does not prefetch.
FIXED_BYTES = {"cpu": 0}
ACCELERATOR_FIXED_BYTES = 256 * MIB
# Code of one program in a TPU's memory, without and with prompts, by number of chips
# (1, several): the largest in `aot-costs-after.json` and `aot_memory.json`. A few
# programs have more (up to 189 MB on one chip, 365 MB on several), most have far less,
# and the plan sums all programs. On GPUs the code is part of the fixed bytes.
CODE_BYTES = {1: (28 * 10**6, 74 * 10**6), 2: (107 * 10**6, 238 * 10**6)}
# Largest temporaries of a layer per token, in its feed-forward part: gate and up
# products in float32 and their result in the type of the next matrix, each times the
# feed-forward width; the residual stream and products in float32, times the hidden
# size. XLA's buffer assignment of 27B for an H200 has exactly these buffers: 10 bytes
# times the feed-forward width and 10 times the hidden size (here 16).
GATE_AND_UP_BYTES, MODEL_WIDTH_BYTES = 2 * 4, 4 * 4
# XLA:CPU stores the activation separately, and copies rows for its panels.
CPU_FEED_FORWARD_BYTES = 5 * 4
# A TPU copies one of both products into another layout: each of 6,144 more tokens of 2B
# on a v6e takes 14 bytes times the feed-forward width and 14 times the hidden size.
TPU_COPY_BYTES = 4


def plan_for(
    args: EngineArgs, device: str | None = None, *, has_compiler: bool = False
) -> MemoryPlan:
    """Return the memory plan of an engine with these arguments.

    No weights are read. Published models need no download.

    Args:
        device: Name of devices, e.g. "v5e-8"; None for the present ones.
        has_compiler: Compile the largest program, and use its temporaries instead of an
            estimate.

    Raises:
        ConfigError: An argument cannot work, or it does not fit.
    """
    with tempfile.TemporaryDirectory() as folder:
        args = _with_published(args, Path(folder))
        config = args.create_engine_config()
    mesh = build_mesh(config) if device is None else named_mesh(device, config)
    config, mesh, sharding = spread_draft(config, mesh, device=device)
    config, plan = fit(config, mesh, device=device)
    cost = round_cost_of(config, mesh, plan.facts)
    if has_compiler:
        compiled_bytes = compiled_temporaries(config, describe_mesh(device, config))
        plan = fit(config, mesh, device=device, compiled_bytes=compiled_bytes)[1]
    return dataclasses.replace(plan, draft_sharding=sharding, round_cost=cost)


def round_cost_of(
    config: EngineConfig, mesh: Mesh, facts: MemoryFacts, context: int = CONTEXT
) -> RoundCost | None:
    """Return the computed cost of rounds with drafts.

    Args:
        context: Tokens of every sequence; at most `max_model_len` are counted.

    Returns:
        None without drafts, or if the devices' speeds are unknown.
    """
    speculative, target = config.speculative, config.model_config
    speeds = speeds_of(mesh.devices.flat[0].device_kind)
    if speculative is None or speeds is None:
        return None
    context = min(context, config.max_model_len)
    windows = [target.window(number) for number in range(target.num_layers)]
    kept = {"local": min(context, *(one or context for one in windows))}

    def cost(
        weights: ModelBytes, num_devices: int, num_layers: int, hidden_size: int
    ) -> PassCost:
        by_group = facts.kv_bytes_per_token(weights.page_bytes)
        return PassCost(
            weight_bytes=weights.read_bytes,
            kv_bytes=sum(n * kept.get(key, context) for key, n in by_group.items()),
            operations=2 * weights.num_values,
            num_devices=num_devices,
            num_layers=num_layers,
            hidden_size=hidden_size,
        )

    draft, model, head = None, config.draft_model_config, config.head_config
    if model is not None:
        devices = speculative.draft_tensor_parallel_size or mesh.size
        draft = cost(facts.draft, devices, model.num_layers, model.hidden_size)
    elif head is not None:
        layers = getattr(head, "num_layers", 1)
        draft = cost(facts.draft, mesh.size, layers, head.target_hidden_size)
    method = speculative.method_info
    max_draft_tokens = method.max_draft_tokens
    if head is not None and head.max_draft_tokens is not None:
        max_draft_tokens = min(max_draft_tokens, head.max_draft_tokens)
    return RoundCost(
        speeds=speeds,
        target=cost(facts.target, mesh.size, target.num_layers, target.hidden_size),
        draft=draft,
        has_one_pass=method.has_one_pass,
        max_draft_tokens=max_draft_tokens,
        context=context,
    )


def _with_published(args: EngineArgs, folder: Path) -> EngineArgs:
    """Replace names of published models by folders with their config.json."""

    def local(name: Any) -> Any:
        content = published_config(name) if isinstance(name, str) else None
        if content is None or name in BUNDLED_NAMES or os.path.isdir(name):
            return name
        path = folder / Path(name).name / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content), encoding="utf-8")
        return str(path.parent)

    names = ("model", "speculative_model", "spec_model")
    changes = {name: local(getattr(args, name)) for name in names}
    merged = args.speculative_config
    if merged is not None and "model" in merged:
        changes["speculative_config"] = merged | {"model": local(merged["model"])}
    # The plan does not depend on these, and they would be downloaded.
    changes |= dict(tokenizer=None, generation_config="vllm", load_format="dummy")
    return dataclasses.replace(args, **changes)


def spread_draft(
    config: EngineConfig,
    mesh: Mesh,
    *,
    device: str | None = None,
    others: Others = (),
) -> tuple[EngineConfig, Mesh, DraftSharding | None]:
    """Choose the number of devices of the draft model, unless the user has set it.

    Args:
        device: Name of devices that are not present.
        others: Results of `own_memory` in the other processes.

    Returns:
        The configuration with that number, a mesh of the same devices for it, and the
        comparison; None if there is no choice, or the devices' speeds are unknown.
    """
    speculative, draft = config.speculative, config.draft_model_config
    speeds = speeds_of(mesh.devices.flat[0].device_kind)
    if speculative is None or draft is None or speeds is None or mesh.size == 1:
        return config, mesh, None

    def with_size(devices: int) -> tuple[EngineConfig, Mesh]:
        changed = dataclasses.replace(speculative, draft_tensor_parallel_size=devices)
        all_devices = list(mesh.devices.flat)
        return (
            dataclasses.replace(config, speculative=changed),
            make_mesh(config.tensor_parallel_size, devices, all_devices),
        )

    given_sizes = config.given or GivenSizes()
    sizes = []
    refused: UnsupportedError | None = None
    for devices in range(mesh.size, 0, -1):
        if mesh.size % devices:
            continue
        sharded_config, sharded_mesh = with_size(devices)
        try:
            facts = find_facts(
                sharded_config, sharded_mesh, given_sizes, device, others
            )
        except UnsupportedError as error:  # the kernels cannot read such pages
            refused = error
            continue
        try:
            num_pages = _planned(sharded_config, facts).num_pages
        except ConfigError:
            num_pages = None  # if no size fits, `fit` raises
        sizes.append(
            estimate(
                speeds,
                devices=devices,
                read_bytes=facts.draft.read_bytes,
                num_layers=draft.num_layers,
                hidden_size=draft.hidden_size,
                num_seqs=given_sizes.max_num_seqs or ACCELERATOR_SIZES.num_seqs,
                num_pages=num_pages,
            )
        )
    if not sizes:
        assert refused is not None
        raise refused
    sharding = choose(sizes)
    if config.given is None or given_sizes.draft_tensor_parallel_size is not None:
        devices = speculative.draft_tensor_parallel_size
        sharding = dataclasses.replace(sharding, devices=devices, is_given=True)
    return *with_size(sharding.devices), sharding


def fit(
    config: EngineConfig,
    mesh: Mesh,
    *,
    device: str | None = None,
    compiled_bytes: int | None = None,
    others: Others = (),
) -> tuple[EngineConfig, MemoryPlan]:
    """Plan the memory of a mesh's devices, and apply the sizes to the configuration.

    Args:
        device: Name of devices that are not present.
        compiled_bytes: Temporaries of the largest program, if it has been compiled.
        others: Results of `own_memory` in the other processes.

    Raises:
        ConfigError: It does not fit.
    """
    given_sizes = config.given or GivenSizes()
    facts = find_facts(config, mesh, given_sizes, device, others)
    facts = dataclasses.replace(facts, compiled_bytes=compiled_bytes)
    plan = _planned(config, facts)
    fitted = dataclasses.replace(
        config,
        max_num_seqs=plan.sizes.num_seqs,
        max_num_batched_tokens=plan.sizes.num_batched_tokens,
        num_pages=plan.num_pages,
    )
    fitted.check_pages()
    return fitted, plan


def _planned(config: EngineConfig, facts: MemoryFacts) -> MemoryPlan:
    given_sizes = config.given or GivenSizes()
    has_no_limit = (
        facts.limit_bytes is None and given_sizes.kv_cache_memory_bytes is None
    )
    if config.given is None or has_no_limit:
        given_sizes = GivenSizes(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_pages=config.num_pages,
        )
    return plan_memory(facts, given_sizes)


def find_facts(
    config: EngineConfig,
    mesh: Mesh,
    given_sizes: GivenSizes,
    device: str | None = None,
    others: Others = (),
) -> MemoryFacts:
    """Return the facts for the memory plan of a mesh's devices.

    Raises:
        ConfigError: The devices' memory or their name is unknown.
    """
    first = mesh.devices.flat[0]
    speeds = speeds_of(first.device_kind)
    memory = [_limit_and_use(mesh, given_sizes, device), *others]
    limit = min((one for one, _ in memory if one is not None), default=None)
    used = max(one for _, one in memory)
    if limit is not None and device is None and first.platform == "cpu":
        limit //= config.data_parallel_size  # engines share the host's memory
    is_gpu = first.platform not in ("cpu", "tpu")
    dtype = resolve_dtype(config.dtype, mesh)

    def pool_with(count: int) -> PoolShape:
        num_pages = count * (config.unit_pages or 1)
        return dataclasses.replace(pool_of(config), num_pages=num_pages)

    def target_pages(count: int) -> Any:
        return page_forms(
            config.model_config, dtype, pool_with(count), mesh, TARGET_MESH_AXES
        )

    def proposer_state(count: int) -> Any:
        pool = pool_with(count)
        return [one.state_forms(dtype, pool, mesh) for one in proposers_of(config)]

    def pages_of_both(count: int) -> Any:
        return target_pages(count), proposer_state(count)

    target_params = abstract_params(config.model_config, dtype=dtype, mesh=mesh)
    draft_params = None
    if config.draft_model_config is not None:
        draft_params = abstract_params(
            config.draft_model_config,
            dtype=dtype,
            mesh=mesh,
            mesh_axes=DRAFT_MESH_AXES,
        )
    elif config.head_config is not None:
        draft_params = abstract_head(config.head_config, dtype=dtype, mesh=mesh)
    kv_dtype = config.kv_cache_dtype
    # Proposers' state has a part per page and a fixed part: the difference is one page.
    draft_page = bytes_of(proposer_state(2)) - bytes_of(proposer_state(1))
    fixed_bytes = bytes_of(proposer_state(1)) - draft_page
    programs = _program_facts(config, mesh)
    shared: Params = {}
    if config.head_config is not None and not _has_output(draft_params):
        shared = {HEAD: target_params.get(HEAD, target_params[EMBEDDING])}
    return MemoryFacts(
        device=device or first.device_kind,
        platform=first.platform,
        num_devices=mesh.size,
        devices_per_chip=speeds.devices_per_chip if speeds else 1,
        limit_bytes=limit,
        limit_share=pool_share(given_sizes.gpu_memory_utilization) if is_gpu else 1.0,
        most_share=most_pool_share(given_sizes.gpu_memory_utilization)
        if is_gpu
        else 1.0,
        used_bytes=used,
        target=ModelBytes(
            weight_bytes=bytes_of(target_params),
            page_bytes=bytes_of(target_pages(1)),
            unread_bytes=_unread_bytes(target_params),
            num_values=_num_values(target_params),
            form=_described(config.model_config),
        ),
        draft=ModelBytes(
            weight_bytes=bytes_of(draft_params) + fixed_bytes,
            page_bytes=draft_page,
            unread_bytes=_unread_bytes(draft_params),
            shared_bytes=bytes_of(shared),
            num_values=_num_values(draft_params) + _num_values(shared),
            form=_described(config.draft_model_config),
        ),
        draft_name="draft model" if config.head_config is None else "head",
        programs=programs,
        programs_without=_programs_without(config, mesh, programs),
        kv_dtype=dtype.name if kv_dtype == "auto" else kv_dtype,
        page_size=config.page_size,
        max_model_len=config.max_model_len,
        local=_local_pages(config, given_sizes, first.platform),
        page_arrays=_page_arrays(pages_of_both(1), pages_of_both(2)),
    )


def _page_arrays(one: Any, two: Any) -> tuple[tuple[int, int], ...]:
    """Return `MemoryFacts.page_arrays`.

    Args:
        one, two: Arrays of pools of one page and of two.
    """
    before, after = jax.tree.leaves(one), jax.tree.leaves(two)
    found = {
        (math.prod(_device_shape(b)) - math.prod(_device_shape(a)), b.dtype.itemsize)
        for a, b in zip(before, after, strict=True)
    }
    return tuple(sorted(array for array in found if array[0]))


def _local_pages(
    config: EngineConfig, given_sizes: GivenSizes, platform: str
) -> LocalPages | None:
    """Return the sizes of local pages with the most prompt tokens of a launch."""
    if config.local_window is None or config.unit_pages is None:
        return None
    default = CPU_SIZES if platform == "cpu" else ACCELERATOR_SIZES
    num_tokens = given_sizes.max_num_batched_tokens or default.num_batched_tokens
    return LocalPages(
        unit_pages=config.unit_pages,
        decode_pages=config.decode_local_pages,
        max_pages=config.most_local_pages(num_tokens),
    )


def own_memory(config: EngineConfig, mesh: Mesh) -> tuple[int | None, int]:
    """Return the limit and the used bytes of this process's devices.

    Raises:
        ConfigError: The devices' memory is unknown.
    """
    return _limit_and_use(mesh, config.given or GivenSizes(), None)


def compiled_temporaries(config: EngineConfig, mesh: Mesh) -> int:
    """Compile the largest program of ordinary rounds; return its temporary bytes.

    Takes a minute or two at full size.
    """
    program, forms = describe(config, mesh)
    shapes = Shapes(config, SpeculationPolicy(config.speculative)).all(
        with_on_demand=True
    )
    shape = max(
        shapes,
        key=lambda one: (not one.is_draft_prefill, one.max_prompt_tokens, one.num_seqs),
    )
    lowered = lower_step(program, shape, forms)
    compiled: Any = lowered.compile(options_of(config, mesh))
    return compiled.memory_analysis().temp_size_in_bytes


def _described(model: ModelConfig | None) -> str:
    if model is None:
        return ""
    parts = [] if model.quantization is None else [model.quantization.describe()]
    if model.draft_vocab_size is not None:
        kept, whole = model.draft_vocab_size, model.vocab_size
        parts.append(f"a head of {kept:,} of {whole:,} tokens")
    return ", ".join(parts)


def _has_output(params: Params | None) -> bool:
    """Return whether a model or head has an output matrix of its own."""
    return params is not None and any(
        name == HEAD or name.startswith("lm_head") for name in params
    )


def _unread(params: Params | None) -> Params:
    """Return the embedding if a separate matrix computes the logits."""
    is_apart = params is not None and EMBEDDING in params and _has_output(params)
    return {EMBEDDING: params[EMBEDDING]} if params and is_apart else {}


def _unread_bytes(params: Params | None) -> int:
    return bytes_of(_unread(params))


def _num_values(params: Params | None) -> int:
    """Return the number of values of the weights that a pass reads on one device."""
    leaves = jax.tree.leaves(params), jax.tree.leaves(_unread(params))
    whole, unread = (sum(math.prod(_device_shape(x)) for x in one) for one in leaves)
    return whole - unread


def bytes_of(forms: Any) -> int:
    """Return the bytes of arrays of these shapes and placements on one device."""
    return sum(
        stored_bytes(_device_shape(leaf), leaf.dtype) for leaf in jax.tree.leaves(forms)
    )


def _device_shape(leaf: Any) -> tuple[int, ...]:
    return leaf.sharding.shard_shape(leaf.shape)


def _program_facts(config: EngineConfig, mesh: Mesh) -> ProgramFacts:
    model, platform = config.model_config, mesh.devices.flat[0].platform
    speculative, draft_vocab = config.speculative, 0
    if speculative is not None and speculative.method_info.weights:
        # Greedy drafts have no distributions.
        if not speculative.drafts_argmax:
            # A pass makes distributions over the draft's columns, twice; a device
            # stores the columns that it verifies.
            draft_part = _part(model.vocab_size, mesh, DRAFT_MESH_AXES)
            target_part = _part(model.vocab_size, mesh, TARGET_MESH_AXES)
            draft_vocab = min(
                draft_part, target_part + 2 * draft_part // config.max_draft_tokens
            )
    hidden = _part(model.intermediate_size, mesh, TARGET_MESH_AXES)
    feed_forward_bytes = GATE_AND_UP_BYTES + resolve_dtype(config.dtype, mesh).itemsize
    if platform == "cpu":
        feed_forward_bytes = CPU_FEED_FORWARD_BYTES
    code = 0
    if platform == "tpu":
        feed_forward_bytes += TPU_COPY_BYTES
        plain, with_prompts = CODE_BYTES[min(mesh.size, 2)]
        shapes = Shapes(config, SpeculationPolicy(speculative)).all(with_on_demand=True)
        code = sum(
            with_prompts if shape.max_prompt_tokens else plain for shape in shapes
        )
    num_nodes = speculative.num_nodes if speculative else 0
    return ProgramFacts(
        num_levels=config.max_draft_tokens,
        num_side_nodes=num_nodes - config.max_draft_tokens,
        vocab_size=_part(model.vocab_size, mesh, TARGET_MESH_AXES),
        draft_vocab_size=draft_vocab,
        max_model_len=config.max_model_len,
        is_invariant=config.batch_invariant,
        token_bytes=feed_forward_bytes * hidden + MODEL_WIDTH_BYTES * model.hidden_size,
        row_tile=8 if platform == "tpu" else 1,
        fixed_bytes=FIXED_BYTES.get(platform, ACCELERATOR_FIXED_BYTES),
        code_bytes=code,
    )


def _programs_without(
    config: EngineConfig, mesh: Mesh, programs: ProgramFacts
) -> ProgramFacts:
    """Return the facts of the programs if the engine had no draft model or head."""
    if config.speculative is not None and config.speculative.method_info.lookup:
        # Lookups still make drafts, without distributions.
        return dataclasses.replace(programs, draft_vocab_size=0)
    none: dict[str, Any] = dict.fromkeys(
        ("speculative", "draft_model_config", "head_config", "draft_token_ids")
    )
    return _program_facts(dataclasses.replace(config, **none), mesh)


def _part(size: int, mesh: Mesh, mesh_axes: tuple[str, ...]) -> int:
    """Return one device's part of an axis; all of it if it does not divide evenly."""
    parts = num_parts(mesh, mesh_axes)
    return size if size % parts else size // parts


def _limit_and_use(
    mesh: Any, given_sizes: GivenSizes, device: str | None
) -> tuple[int | None, int]:
    """Return the smallest limit and the largest use of this process's devices."""
    if device is not None:
        return named_limit(device, given_sizes.gpu_memory_utilization), 0
    if mesh.devices.flat[0].platform == "cpu":
        has_share = given_sizes.gpu_memory_utilization is not None
        return (ram_bytes() if has_share else None), 0
    stats = [one.memory_stats() or {} for one in mesh.local_devices]
    limits = [one["bytes_limit"] for one in stats if one.get("bytes_limit")]
    if not limits:
        if given_sizes.num_pages is None and given_sizes.kv_cache_memory_bytes is None:
            kind = mesh.devices.flat[0].device_kind
            raise ConfigError(
                f"{kind} does not report its memory, so "
                f"gpu_memory_utilization={DEFAULT_UTILIZATION:g} cannot be applied: "
                "set kv_cache_memory_bytes.",
                parameter="kv_cache_memory_bytes",
                value=None,
            )
        return None, 0
    return min(limits), max(one.get("bytes_in_use", 0) for one in stats)


def ram_bytes() -> int:
    """Return the machine's memory, or the cgroup's limit if it is lower."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    path = Path("/sys/fs/cgroup/memory.max")
    text = path.read_text().strip() if path.exists() else ""
    return min(physical, int(text)) if text.isdecimal() else physical
