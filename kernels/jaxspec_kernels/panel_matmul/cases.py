"""Named shapes of products: the calls of the bundled pair, and edge cases."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call."""

    rows: int
    features: int
    outputs: int


CASES = {
    "tiny/q_proj": Case(rows=4, features=384, outputs=384),
    "tiny/gate_up_proj": Case(rows=6, features=384, outputs=3072),
    "tiny/down_proj": Case(rows=48, features=1536, outputs=384),
    "tiny/prefill": Case(rows=130, features=384, outputs=384),
    "tiny-draft/kv_proj": Case(rows=1, features=256, outputs=128),
    "two features": Case(rows=13, features=2, outputs=96),
    "a pad of each": Case(rows=7, features=25, outputs=49),
    "less than a panel": Case(rows=2, features=1, outputs=3),
}
