"""Whole engines say thousands of texts here; parts have their tests elsewhere."""

import pytest


@pytest.fixture(autouse=True)
def _calls_are_not_checked(unchecked_types):
    """Tests of the parts make the same calls, with their types checked."""
