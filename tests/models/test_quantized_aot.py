"""Quantized layers, compiled without the devices: no matrix is widened in memory.

Layers of 2B, 9B and 27B, the last also split over eight chips. XLA converts values
within the fusion of the dot that reads them; otherwise it would write and read a
bfloat16 matrix, which would cost more than quantization saves. On a GPU, matrices with
scales of groups of features, such as those of GGUF files, are multiplied by a kernel.
"""

import dataclasses
import itertools
import math

import pytest

from jaxspec.config.engine import EngineConfig
from jaxspec.engine.memory.device_descriptions import describe_mesh, named_devices
from jaxspec.program.plan import Features, StepShape
from jaxspec_checkpoints import Sizes, tensor_shapes
from jaxspec_checkpoints.gemma.published import published_config
from jaxspec_checkpoints.layout import EMBEDDING
from jaxspec_checkpoints.quantization import (
    GGUF_SCHEMES,
    GROUP_SIZES,
    MixedScheme,
    Scheme,
)
from tests.long_suites import members
from tests.program import hlo
from tests.program.aot_record import (
    compile_step,
    engine_config,
    skip_without_compiler,
)

# One local and one global layer.
NUM_LAYERS = 2
# The smallest matrix takes 4.7 MB in int8 (27B on one of eight chips: 2.4 MB), and
# twice that in bfloat16: on a TPU the limit is below every widened matrix. On a GPU it
# allows for 8.2 MB of float32 logits, which a TPU does not write.
TEMP_BYTES = {"v5e-1": 2**22, "v5e-8": 2**22} | dict.fromkeys(
    ("h200", "h200-2", "b200"), 2**24
)
NAMED = {kind: Scheme(kind=kind, group_size=GROUP_SIZES[kind]) for kind in GROUP_SIZES}
# Types of GGUF files: int4 and int8 in groups of 32 and 16 features, the last two with
# minima. Some models have one of these types, one model has several.
GGUF_TYPES = ("Q4_0", "Q8_0", "Q3_K", "Q6_K", "Q4_K", "Q5_K")
MIXED = "mixed"
PER_OUTPUT = "int4 per output"  # in files of compressed-tensors
_MIXED_TYPES = {
    "q_proj": "Q4_0", "k_proj": "Q4_0", "v_proj": "Q4_0", "o_proj": "Q8_0",
    "gate_proj": "Q3_K", "up_proj": "Q3_K", "down_proj": "Q6_K",
}  # fmt: skip


def scheme_of(kind: str, name: str) -> Scheme:
    """Return the scheme of a layer's matrix `name`."""
    if kind == MIXED:
        kind = _MIXED_TYPES[name.split(".")[-2]]
    if kind == PER_OUTPUT:
        return Scheme(kind="int4", method="compressed-tensors")
    return (NAMED | GGUF_SCHEMES)[kind]


def with_gguf_types(config: EngineConfig, kind: str, sizes: Sizes) -> EngineConfig:
    """Return the config of a model from a GGUF file with these types."""
    types = {
        name: _MIXED_TYPES[name.split(".")[-2]] if kind == MIXED else kind
        for name, shape in tensor_shapes(sizes).items()
        if len(shape) > 1 and name != EMBEDDING
    }
    scheme = MixedScheme(types=tuple(types.items()))
    model = dataclasses.replace(config.model_config, quantization=scheme)
    return dataclasses.replace(config, model_config=model)


def sizes_of(size: str) -> Sizes:
    """Return the sizes of the layers that are compiled."""
    config = published_config(size)
    return Sizes(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=NUM_LAYERS,
        num_q_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
    )


def expected_bytes(size: str, kind: str) -> float:
    """Return the bytes of all weights, which a pass reads once, by published sizes.

    Matrices of layers are quantized, norms and the embedding are not.
    """
    value_bytes = {"int8": 1, "fp8": 1, "int4": 0.5}
    total = 0.0
    for name, shape in tensor_shapes(sizes_of(size)).items():
        if len(shape) < 2 or name == EMBEDDING:
            total += 2 * math.prod(shape)
            continue
        scheme = scheme_of(kind, name)
        # One float32 scale, and a minimum, for each output and group of features.
        num_scales = math.prod(scheme.scales_shape(shape))
        total += value_bytes[scheme.kind] * math.prod(shape) + 4 * num_scales
    return total


@pytest.mark.aot
@pytest.mark.parametrize(
    ("devices", "size", "kind"),
    members(
        "quantized",
        [
            *itertools.product(
                ("v5e-1",), ("2b", "9b", "27b"), ("int8", "int4", "fp8")
            ),
            *itertools.product(("v5e-8",), ("27b",), ("int8", "int4", "fp8")),
            *itertools.product(("v5e-1",), ("2b",), (*GGUF_TYPES, MIXED)),
            *itertools.product(("h200",), ("2b", "9b", "27b"), ("int8", "int4", "fp8")),
            *itertools.product(("h200",), ("2b",), (*GGUF_TYPES, PER_OUTPUT, MIXED)),
            *itertools.product(("h200-2", "b200"), ("9b",), ("int4", "Q4_K")),
            ("h200-2", "2b", PER_OUTPUT),
        ],
        is_example=lambda case: (
            case in (("v5e-1", "2b", "int8"), ("h200", "2b", "int4"))
        ),
    ),
)
def test_no_matrix_is_widened_in_memory(devices, size, kind):
    skip_without_compiler(devices)
    num_chips = len(named_devices(devices))
    config = engine_config(
        size,
        num_layers=NUM_LAYERS,
        quantization=kind if kind in NAMED else None,
        dtype="bfloat16",
        tensor_parallel_size=num_chips,
        max_num_seqs=8,
        num_gpu_blocks_override=512,
    )
    if kind == PER_OUTPUT:
        model = dataclasses.replace(
            config.model_config, quantization=scheme_of(kind, "")
        )
        config = dataclasses.replace(config, model_config=model)
    elif kind not in NAMED:
        config = with_gguf_types(config, kind, sizes_of(size))
    shape = StepShape(
        num_seqs=8,
        num_levels=0,
        max_prompt_tokens=0,
        features=Features(all_greedy=True),
    )
    step = compile_step(config, describe_mesh(devices, config), shape)
    facts, target = step.facts, step.forms[0]
    print(devices, size, kind, facts)
    # No matrix is widened in on-chip memory, S(1), either, where an eighth of a 27B
    # matrix would fit.
    assert hlo.dequantized(step.text.replace("S(1)", ""), target["layers"]) == []
    assert facts["temp_bytes"] < TEMP_BYTES[devices]
    # Arguments: values of 8 or 4 bits, and scales. Matrices are split over chips;
    # vectors and the rows of a round are replicated.
    read = facts["argument_bytes"] - facts["state_bytes"]
    expected = expected_bytes(size, kind) / num_chips
    assert expected <= read < 1.01 * expected


@pytest.mark.aot
@pytest.mark.long_suite(name="quantized")
@pytest.mark.parametrize("kind", ["int4", "Q4_K"])
def test_a_prompt_on_a_gpu_writes_no_products_of_groups(kind):
    """XLA would write 0.7 GB (groups of 128) or 2.9 GB (of 32) for 512 tokens."""
    skip_without_compiler("h200")
    config = engine_config(
        "2b",
        num_layers=NUM_LAYERS,
        quantization=kind if kind in NAMED else None,
        dtype="bfloat16",
        max_num_seqs=8,
        num_gpu_blocks_override=512,
    )
    if kind not in NAMED:
        config = with_gguf_types(config, kind, sizes_of("2b"))
    shape = StepShape(
        num_seqs=8,
        num_levels=0,
        max_prompt_tokens=512,
        features=Features(all_greedy=True),
    )
    step = compile_step(config, describe_mesh("h200", config), shape)
    assert hlo.dequantized(step.text, step.forms[0]["layers"]) == []
    # Rows of the largest products take 38 MB.
    assert step.facts["temp_bytes"] < 2**27
