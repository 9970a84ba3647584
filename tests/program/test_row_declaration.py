"""A new value that the device stores per request needs one line of code."""

import subprocess
import sys
import textwrap
from importlib import util
from pathlib import Path

LINE = "    min_p: Any = column(np.float32)\n"
ADDED = LINE + "    typical_p: Any = column(np.float32, pad=1)\n"

# Reads the module with the line added, then sends a plan to the device and back.
SCRIPT = """
import sys, types
import jax
import jax.numpy as jnp

module = types.ModuleType("jaxspec.program.plan")
sys.modules[module.__name__] = module
exec(compile(open(sys.argv[1]).read(), sys.argv[1], "exec"), module.__dict__)

from jaxspec.program.plan import Admission, PoolShape, StepPlan, StepShape
from jaxspec.program.rows import apply_plan, gather, init_rows, read_tiles
from jaxspec.program.wire import PlanLayout

pool = PoolShape(num_rows=4, num_pages=9, page_size=4, max_model_len=16, vocab_size=70)
shape = StepShape(num_seqs=2, num_levels=1, max_prompt_tokens=32)
layout = PlanLayout(shape, pool)
asked = Admission(
    row=2, num_prompt=3, min_total=0, max_total=9, temperature=1.0, top_k=0, top_p=1.0,
    min_p=0.0, typical_p=0.25, seed=(1, 2), rule=0, stop_ids=(),
)
tokens = jnp.zeros((9, 4), jnp.int32)
empty = jax.tree.map(jnp.asarray, init_rows(pool))

@jax.jit
def stored(plan):
    fields = layout.read(plan)
    rows, _ = apply_plan(empty, tokens, fields, read_tiles(fields), pool)
    return gather(rows, tokens, jnp.array([2, 1])).typical_p

print(stored(layout.pack(StepPlan(admissions=[asked]))).tolist())
"""


def test_new_request_value_is_declared_once(tmp_path: Path):
    spec = util.find_spec("jaxspec.program.plan")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    assert source.count(LINE) == 1
    changed = tmp_path / "plan.py"
    changed.write_text(source.replace(LINE, ADDED))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(changed)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # The value of the admitted row, and the default of another row.
    assert done.stdout.strip() == "[0.25, 1.0]"
