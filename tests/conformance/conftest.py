"""Whole engines generate thousands of texts here; type checks would take most of it."""

import pytest


@pytest.fixture(autouse=True)
def _calls_are_not_checked(unchecked_types):
    """Tests of the parts make the same calls with their types checked."""
