"""Settings of KV events, which publish the pages of an engine's prefix cache.

Keys and defaults are those of vLLM's `KVEventsConfig`. Knows nothing about sockets.
"""

from dataclasses import dataclass, fields
from typing import no_type_check

from jaxspec.errors import (
    ConfigError,
    check_choice,
    check_flag,
    check_integer,
    named_in,
    read_keys,
    wrong_argument,
)

PUBLISHERS = ("null", "zmq")
_NAME = "kv_events_config"


# The tests do not check it with jaxtyping: its own checks have better errors.
@no_type_check
@dataclass(frozen=True, kw_only=True)
class KvEventsConfig:
    """Where an engine publishes the pages of its prefix cache, with vLLM's names.

    Attributes:
        enable_kv_cache_events: Publish events.
        publisher: "zmq", or "null" for none; None is "zmq" if events are enabled.
        endpoint: Address of a PUB socket. It is bound if the address has a "*" or "::"
            or is a file (ipc://); otherwise it connects. With data parallelism, N is
            added to the port of engine N.
        replay_endpoint: Address at which the last batches can be requested again.
        buffer_steps: Number of batches for replay.
        hwm: Maximum number of batches queued for a slow subscriber (ZeroMQ's high-water
            mark); it misses later ones.
        max_queue_size: Maximum number of batches waiting to be sent; later ones are
            dropped.
        topic: ZeroMQ topic, by which subscribers filter; llm-d needs
            "kv@<pod>@<model>".
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self):
        name = "enable_kv_cache_events"
        check_flag(ConfigError, name, self.enable_kv_cache_events)
        if self.publisher is not None:
            check_choice(ConfigError, "publisher", self.publisher, PUBLISHERS)
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            check_integer(ConfigError, name, getattr(self, name), low=1)
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if name == "replay_endpoint" and value is None:
                continue
            if not isinstance(value, str) or not value.startswith(("tcp://", "ipc://")):
                allowed = "an address of ZeroMQ: tcp://host:port or ipc://file"
                raise wrong_argument(ConfigError, name, allowed, value)
            if value.startswith("tcp://") and not value.rpartition(":")[2].isdigit():
                allowed = "tcp:// with a port, as in tcp://*:5557"
                raise wrong_argument(ConfigError, name, allowed, value)
        if not isinstance(self.topic, str):
            raise wrong_argument(ConfigError, "topic", "text", self.topic)

    @property
    def is_on(self) -> bool:
        """Whether KV events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @classmethod
    def read(cls, given: object) -> "KvEventsConfig":
        """Read `kv_events_config`: a dict, or None.

        Raises:
            ConfigError: The value is neither, or has an unknown key or a wrong value.
        """
        if given is None or isinstance(given, cls):
            return given or cls()
        values = read_keys(_NAME, given, [item.name for item in fields(cls)])
        with named_in(_NAME):
            return cls(**values)
