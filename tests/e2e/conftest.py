"""Type checks of calls are disabled, as engines generate thousands of texts here."""

import pytest


@pytest.fixture(autouse=True)
def _calls_are_not_checked(unchecked_types):
    """Disable type checks of calls; unit tests make the same calls with checks."""
