"""Tests of `hlo`, which reads a compiled program's text."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from tests.program import hlo

HLO = """
  %a = (f32[1,32000]{1,0:T(8,128)}, f32[8,256000]{1,0}) all-gather-start(%x), dim=1
  %b = ((f32[1,256]{1,0}), (f32[8,4,1024]{2,1,0})) all-gather-start(%y, %z), dim=1
  %c = f32[40,3584]{1,0:T(8,128)S(1)} all-reduce(%w), to_apply=%add
  %d = (f32[64,8]{1,0}, f32[64,8]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%v)
  %e = (f32[96,8]{1,0:S(1)}, f32[96,8]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%u)
  ROOT %f = bf16[16,2304]{1,0:T(8,128)(2,1)} transpose(%t), dimensions={1,0}
"""


def test_moves_are_read_in_every_form():
    """A copy to on-chip memory, S(1), is not a move; a copy from there is one."""
    assert hlo.moves(HLO) == {
        "all-gather-start f32[8,256000]": 8 * 256000 * 4,
        "all-gather-start f32[8,4,1024]": 8 * 4 * 1024 * 4,
        "copy-start f32[64,8]": 64 * 8 * 4,
        "transpose bf16[16,2304]": 16 * 2304 * 2,
    }
    assert hlo.largest_collective(HLO, but=(3584,)) == 8 * 256000
    assert hlo.all_reduces(HLO) == {"f32[40,3584]": 1}
    assert hlo.collectives(HLO) == {
        "all-gather f32[8,256000]": 1,
        "all-gather f32[8,4,1024]": 1,
        "all-reduce f32[40,3584]": 1,
    }
    assert hlo.bytes_of("all-gather f32[8,4,1024]") == 8 * 4 * 1024 * 4
    assert hlo.bytes_of("copy bf16[]") == 2
    assert hlo.shape_of("transpose bf16[2304,16]") == (2304, 16)
    assert hlo.sizes_of("transpose bf16[2304,16]") == (16, 2304)


NESTED = """
%inner (p: s8[28672,3584]) -> s8[28672,3584] {
  %p = s8[28672,3584]{1,0:T(32,128)(4,1)} parameter(0)
  ROOT %a = s8[28672,3584]{1,0:T(8,128)(4,1)} copy(%p)
}

%outer (q: s8[28672,3584], x: bf16[4,3584]) -> f32[4,28672] {
  %b = s8[28672,3584]{1,0:T(8,128)(4,1)} fusion(%q), kind=kLoop, calls=%inner
  ROOT %c = f32[4,28672]{1,0} dot(%x, %b)
}

%single (r: s8[3584,14336]) -> s8[3584,14336] {
  ROOT %d = s8[3584,14336]{1,0:T(8,128)(4,1)} copy(%r)
}

ENTRY %main (q: s8[28672,3584], r: s8[3584,14336]) -> f32[4,28672] {
  %e = f32[4,28672]{1,0} fusion(%q, %x), kind=kOutput, calls=%outer
  %f = s8[3584,14336]{1,0:T(8,128)(4,1)} fusion(%r), kind=kLoop, calls=%single
}
"""


def test_operand_of_a_fusion_in_another_layout_is_no_move():
    """A fusion of the program that copies is a move; one inside a fusion is none."""
    assert hlo.moves(NESTED) == {"copy s8[3584,14336]": 3584 * 14336}


STACKED = """
%inside (p: bf16[2,4096,512], i: s32[]) -> bf16[4096,512] {
  %a = bf16[1,4096,512]{2,1,0} dynamic-slice(%p, %i, %zero, %zero)
  ROOT %b = bf16[4096,512]{1,0} bitcast(%a)
}

%body (state: (s32[], bf16[2,4096,512])) -> (s32[], bf16[2,4096,512]) {
  %c = bf16[2,4096,512]{2,1,0} get-tuple-element(%state), index=1
  %d = bf16[4096,512]{1,0:T(8,128)S(1)} fusion(%c, %i), kind=kLoop, calls=%inside
  %e = (bf16[1,4096,512]{2,1,0}, f32[8]{0}) fusion(%c, %i), kind=kLoop, calls=%inside
  %f = bf16[1,4096,512]{2,1,0} get-tuple-element(%e), index=0
  %g = bf16[512,4096]{1,0} transpose(%f), dimensions={1,0}
}
"""


def test_entries_taken_out_of_a_stack_are_found():
    """Entries that a fusion reads in place or writes to on-chip memory do not count."""
    place = SingleDeviceSharding(jax.devices()[0])
    stack = jax.ShapeDtypeStruct((2, 4096, 512), jnp.bfloat16, sharding=place)
    vectors = jax.ShapeDtypeStruct((2, 8), jnp.float32, sharding=place)
    expected = ["fusion bf16[1,4096,512]", "transpose bf16[512,4096]"]
    assert hlo.taken_out(STACKED, [stack, vectors]) == expected


def test_copies_of_weights_and_pages_are_found():
    """Copies may have reordered dimensions, or the flat shape of a scatter's rows."""
    place = SingleDeviceSharding(jax.devices()[0])
    forms = {
        "weight": ((2304, 16), "transpose bf16[16,2304]"),
        "pages": ((2, 4, 4, 1024), "all-gather-start f32[8,4,1024]"),
        "other": ((64, 9), None),
    }
    for shape, move in forms.values():
        form = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)
        assert hlo.copied(HLO, [form]) == ([] if move is None else [move])
        assert hlo.local_bytes([form, form]) == 8 * form.size


TREE = """
%fused (p: pred[1,17,17]) -> s32[8,2,17] {
  %a = pred[8,17,17]{2,1,0} broadcast(%p)
  ROOT %b = s32[8,2,17]{2,1,0} convert(%a)
}

ENTRY %main (q: bf16[8,8,34,256]) -> bf16[8,8,34,256] {
  %q = bf16[8,8,34,256]{3,2,1,0} parameter(0)
  %mask = pred[1,17,17]{2,1,0} constant({...})
  %words = s32[8,2,17]{2,1,0:T(2,128)} fusion(%mask), kind=kLoop, calls=%fused
  %wide = bf16[8,34,17]{2,1,0} fusion(%mask), kind=kLoop, calls=%fused
  %seen = bf16[8,17,17]{2,1,0:S(1)} copy(%mask)
  %out = bf16[8,8,34,256]{3,2,1,0} custom-call(%q, /*index=1*/%words), custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/paged_attention/call"}
  %other = f32[8]{0} custom-call(%q), custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/rejection/call"}
}
"""  # noqa: E501


def test_kernel_operands_are_found():
    given = ["bf16[8,8,34,256]", "s32[8,2,17]"]
    assert hlo.kernel_operands(TREE, "paged_attention") == [given]
    assert hlo.kernel_operands(TREE, "rejection") == [given[:1]]


def test_square_arrays_are_found():
    """Arrays inside a fusion or in on-chip memory, S(1), do not count."""
    assert hlo.squares(TREE, 17) == {
        "pred[1,17,17]": 17 * 17,
        "bf16[8,34,17]": 2 * 8 * 34 * 17,
    }


def test_operations_are_counted_in_both_forms_of_a_program():
    lowered = """module @jit_step {
  func.func public @main(%arg0: tensor<2xf32>) -> tensor<2xf32> {
    %0 = stablehlo.add %arg0, %arg0 : tensor<2xf32>
    %1:2 = call @pair(%0) : (tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>)
    return %1#0 : tensor<2xf32>
  }
}"""
    assert hlo.num_operations(lowered) == 2
    compiled = """ENTRY %main (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %add.1 = f32[2]{0} add(%p, %p)
}"""
    assert hlo.num_operations(compiled) == 2


class Unreadable:
    """A compiled program whose text jax cannot parse."""

    def __init__(self, message: str):
        self.message = message

    def as_text(self) -> str:
        raise jax.errors.JaxRuntimeError(self.message)


def test_text_is_none_only_if_jax_cannot_parse_it():
    message = "INTERNAL: async-update instruction should have 1"
    assert hlo.text_of(Unreadable(message)) is None
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        hlo.text_of(Unreadable("out of memory"))
