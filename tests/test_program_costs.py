"""The table of what programs cost: which programs it has, and how it reads."""

from benchmarks import program_costs
from benchmarks.program_costs import FEATURE_SIZES, num_operations, programs_of, table


def test_every_size_of_a_round_is_in_the_table_for_every_basic_kind():
    found = list(programs_of("decode"))
    assert len(found) == len(set(found))
    plain = [size for size, form in found if form == "plain"]
    assert len(plain) == len(program_costs.SEQS) * len(program_costs.DRAFTS)
    assert {(1, 0, 0), (8, 5, 0)} <= set(plain)
    prompts = {size for size, form in programs_of("prompts") if form == "plain"}
    assert {chunk for _, _, chunk in prompts} == set(program_costs.CHUNKS)


def test_kinds_of_requests_are_compared_with_plain_ones_of_the_same_size():
    plain = {size for size, form in programs_of("decode") if form == "plain"}
    special = list(programs_of("features"))
    assert set(FEATURE_SIZES) <= plain
    assert {form for _, form in special} >= {"controls", "grammar", "logprobs 20"}
    at_prompts = [form for size, form in special if size[2]]
    assert at_prompts == ["plain", "controls, logprobs 20", "prompt logprobs 5"]


def test_operations_are_counted_in_both_forms_of_a_program():
    lowered = """module @jit_step {
  func.func public @main(%arg0: tensor<2xf32>) -> tensor<2xf32> {
    %0 = stablehlo.add %arg0, %arg0 : tensor<2xf32>
    %1:2 = call @pair(%0) : (tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>)
    return %1#0 : tensor<2xf32>
  }
}"""
    assert num_operations(lowered) == 2
    compiled = """ENTRY %main (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %add.1 = f32[2]{0} add(%p, %p)
}"""
    assert num_operations(compiled) == 2


def test_a_row_tells_times_by_rows_in_use():
    row = {
        "dtype": "bfloat16",
        "num_seqs": 2,
        "num_draft_tokens": 5,
        "chunk": 0,
        "features": "plain",
        "lower_cpu_s": 1.04,
        "compile_cpu_s": 11.5,
        "lowered_ops": 8000,
        "launches": [
            {"num_rows": 1, "is_sampled": False, "median_ms": 3.0, "min_ms": 2.5},
            {"num_rows": 2, "is_sampled": True, "median_ms": 5.0, "min_ms": 4.0},
        ],
    }
    (line,) = table([row]).splitlines()[2:]
    assert line == (
        "| bfloat16 | 2 | 5 | 0 | plain | 1.0+11.5 | 8,000 | 3.00 (2.50) |  |  |  | "
        "5.00 (4.00) |"
    )
