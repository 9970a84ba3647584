import dataclasses

import pytest

from jaxspec.metrics import Counter, Gauge, Histogram, Vector


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (Counter, ["value"]),
        (Gauge, ["value"]),
        (Vector, ["values"]),
        (Histogram, ["count", "sum", "buckets"]),
    ],
)
def test_fields_equal_vllms(kind: type, own: list[str]):
    names = [item.name for item in dataclasses.fields(kind)]
    assert names == ["name", "labels", *own]
    assert issubclass(Counter, kind) == (kind is Counter), "scripts test the class"
