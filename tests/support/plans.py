"""Example values of plans: an admission and a pool."""

import dataclasses

from jaxspec.program.plan import (
    Admission,
    PoolShape,
    TokenControls,
)

POOL = PoolShape(num_rows=5, num_pages=40, page_size=4, max_model_len=50, vocab_size=70)


ADMISSION = Admission(
    row=3,
    num_prompt=6,
    min_total=9,
    max_total=20,
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    min_p=0.05,
    seed=(2**32 - 1, 7),
    rule=2,
    stop_ids=(1, 15),
)


def with_controls(row: int, controls: TokenControls) -> Admission:
    return dataclasses.replace(ADMISSION, row=row, controls=controls)
