"""Servers for all tests of a file: with the default settings, and for tools."""

from collections.abc import Iterator

import pytest

from tests.support.serving import Client, Site, site_of
from tests.support.tool_chats import AUTO, Stage


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with site_of() as made:
        yield made


@pytest.fixture(scope="module")
def http(site: Site) -> Iterator[Client]:
    with Client(site) as client:
        yield client


@pytest.fixture
def slow_http(http: Client) -> Iterator[Client]:
    """Slow down the device, so that streams have several events."""
    http.site.delay_s = 0.02
    yield http
    http.site.delay_s = 0.0


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    made = Stage(**AUTO)
    yield made
    made.end()
