"""Whole engines generate thousands of texts: type checks would take too long."""

import pytest


@pytest.fixture(autouse=True)
def _calls_are_not_checked(unchecked_types):
    """Unit tests make the same calls with type checks."""
