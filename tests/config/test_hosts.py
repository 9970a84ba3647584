"""Bad arguments for several hosts are rejected before any process is started."""

from pathlib import Path
from typing import Any

import pytest

from jaxspec.config.hosts import DEFAULT_TIMEOUT_S, HostsConfig
from jaxspec.errors import ConfigError

GIVEN: dict[str, Any] = dict(
    nnodes=4,
    node_rank=2,
    master_addr="leader",
    master_port=29501,
    headless=True,
    hosts_secret_file="secret",
    distributed_timeout_seconds=None,
)
ALONE: dict[str, Any] = dict(nnodes=1, hosts_secret_file=None)


def read(**changes: Any) -> Any:
    return HostsConfig.read(**(GIVEN | changes))


def test_given_values_are_stored():
    config = read()
    assert config.is_follower
    assert (config.nnodes, config.node_rank, config.plans_port) == (4, 2, 29502)
    assert config.timeout_s == DEFAULT_TIMEOUT_S
    leader = read(node_rank=0, headless=False, distributed_timeout_seconds=7)
    assert (leader.is_follower, leader.timeout_s) == (False, 7)
    assert read(**ALONE, node_rank=0, headless=False) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (ALONE | dict(headless=False), "node_rank must be 0 where nnodes is 1"),
        (ALONE | dict(node_rank=0), "headless must be False where nnodes is 1"),
        (dict(nnodes=0), "nnodes must be an integer from 1 to"),
        (dict(node_rank=4), "node_rank must be an integer from 0 to 3, got 4"),
        (dict(node_rank=-1), "node_rank must be an integer from 0"),
        (dict(master_port=65535), "master_port must be an integer from 1 to 65534"),
        (dict(master_addr=" "), "master_addr must be the leader's host name"),
        (dict(distributed_timeout_seconds=0), "distributed_timeout_seconds must be"),
        (dict(headless=False), "node_rank=2: add --headless"),
        (dict(node_rank=0), "node_rank=0: leave --headless out"),
        (dict(hosts_secret_file=None), "nnodes=4 needs hosts_secret_file"),
    ],
)
def test_rejects_bad_values(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        read(**changes)


def test_whole_secret_is_read(tmp_path: Path):
    path = tmp_path / "secret"
    config = read(hosts_secret_file=str(path))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        config.read_secret()
    path.write_bytes(b"\n0123456789abcde\n")
    with pytest.raises(ConfigError, match="holds 15 bytes, and must hold at least 16"):
        config.read_secret()
    path.write_bytes(b" 0123456789abcdef\n")
    assert config.read_secret() == b"0123456789abcdef"
