"""These tests run whole engines on thousands of texts; parts are tested elsewhere."""

import pytest


@pytest.fixture(autouse=True)
def _calls_are_not_checked(unchecked_types):
    """Unit tests make the same calls with type checks."""
