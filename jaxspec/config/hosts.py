"""Settings of a target that is spread over the processes of several hosts.

The arguments have vLLM's names, except the secret. Knows nothing about sockets.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import no_type_check

from jaxspec.errors import ConfigError, check_flag, check_integer, wrong_argument

MAX_HOSTS = 1024
# The control channel uses the port after that of jax.distributed.
MAX_MASTER_PORT = 2**16 - 2
# Seconds; the default of jax.distributed.
DEFAULT_TIMEOUT_S = 300
MIN_SECRET_BYTES = 16


@no_type_check
@dataclass(frozen=True, kw_only=True)
class HostsConfig:
    """Settings of one of several processes that run one target.

    Attributes:
        nnodes: Number of processes, one on each host.
        node_rank: Number of this process. The leader, 0, has the engine and the server.
        master_addr: Address at which all processes reach the leader.
        master_port: Port of jax.distributed there; the next one is the control
            channel's.
        headless: This process is a follower, and serves no requests.
        secret_file: File with a secret that is the same for all processes.
        timeout_s: Seconds that processes wait for each other at the start.
    """

    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    headless: bool
    secret_file: str
    timeout_s: int = DEFAULT_TIMEOUT_S

    def __post_init__(self):
        check_integer(ConfigError, "nnodes", self.nnodes, low=2, high=MAX_HOSTS)
        check_integer(
            ConfigError,
            "node_rank",
            self.node_rank,
            low=0,
            high=self.nnodes - 1,
            hint=f"Ranks go from 0, the leader, to nnodes={self.nnodes} - 1.",
        )
        check_integer(
            ConfigError,
            "master_port",
            self.master_port,
            low=1,
            high=MAX_MASTER_PORT,
            hint="The port after it is used as well.",
        )
        name, address = "master_addr", self.master_addr
        if not isinstance(address, str) or not address.strip():
            allowed = "the leader's host name or address"
            raise wrong_argument(ConfigError, name, allowed, address)
        name = "distributed_timeout_seconds"
        check_integer(ConfigError, name, self.timeout_s, low=1)
        check_flag(ConfigError, "headless", self.headless)
        if self.headless != self.is_follower:
            advice = "add --headless: only process 0 has an engine and a server"
            if self.headless:
                advice = "leave --headless out: process 0 has the engine and the server"
            raise ConfigError(
                f"headless={self.headless} contradicts node_rank="
                f"{self.node_rank}: {advice}.",
                parameter="headless",
                value=self.headless,
            )

    @classmethod
    def read(
        cls,
        *,
        nnodes: int,
        node_rank: int,
        master_addr: str,
        master_port: int,
        headless: bool,
        hosts_secret_file: str | None,
        distributed_timeout_seconds: int | None,
    ) -> "HostsConfig | None":
        """Check the engine's arguments; return None for a single process.

        Raises:
            ConfigError: Arguments contradict each other, or one is missing.
        """
        check_integer(ConfigError, "nnodes", nnodes, low=1, high=MAX_HOSTS)
        if nnodes == 1:
            for name, value in (("node_rank", node_rank), ("headless", headless)):
                if value:
                    hint = "Set nnodes to the number of processes."
                    allowed = f"{type(value)()!r} where nnodes is 1"
                    raise wrong_argument(ConfigError, name, allowed, value, hint)
            return None
        if hosts_secret_file is None:
            raise ConfigError(
                f"nnodes={nnodes} needs hosts_secret_file: a file with the same secret "
                f"of {MIN_SECRET_BYTES} bytes or more on every host, with which the "
                "processes sign their messages. `openssl rand -hex 32` makes one.",
                parameter="hosts_secret_file",
                value=None,
            )
        timeout_s = distributed_timeout_seconds
        return cls(
            nnodes=nnodes,
            node_rank=node_rank,
            master_addr=master_addr,
            master_port=master_port,
            headless=headless,
            secret_file=hosts_secret_file,
            timeout_s=DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s,
        )

    @property
    def is_follower(self) -> bool:
        """Whether this process runs the leader's commands."""
        return self.node_rank > 0

    @property
    def plans_port(self) -> int:
        """Port at which the leader listens for followers."""
        return self.master_port + 1

    def read_secret(self) -> bytes:
        """Read the secret, without white space around it.

        Raises:
            ConfigError: The file cannot be read, or the secret is too short.
        """
        name, path = "hosts_secret_file", self.secret_file
        try:
            secret = Path(path).read_bytes().strip()
        except OSError as error:
            raise ConfigError(
                f"{name} {path!r} cannot be read: {error.strerror}. Every host needs "
                "it, with the same content.",
                parameter=name,
                value=path,
            ) from error
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"{name} {path!r} holds {len(secret)} bytes, and must hold at least "
                f"{MIN_SECRET_BYTES}: `openssl rand -hex 32` makes a secret.",
                parameter=name,
                value=path,
            )
        return secret
