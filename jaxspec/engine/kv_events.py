"""Publishes KV events over ZeroMQ: which pages the prefix cache has, in vLLM's format.

A message is (topic, number, batch): the number has 8 bytes, big-endian, from 0 on; the
batch is msgpack of [time, events, engine], an event an array that begins with its name:
["BlockStored", keys, parent, token ids, tokens of a page, None, "GPU"],
["BlockRemoved", keys, "GPU"] or ["AllBlocksCleared"]. llm-d reads these events for
precise prefix routing. ZeroMQ and msgpack are imported only if events are on.
"""

import contextlib
import importlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from jaxspec.config.kv_events import KvEventsConfig
from jaxspec.engine.scheduling.page_events import (
    PageEvent,
    PagesRemoved,
    PagesStored,
)
from jaxspec.errors import ConfigError
from jaxspec.extras import needs_extra

_log = logging.getLogger(__name__)

# vLLM's name for pages in device memory, on any device.
MEDIUM = "GPU"
# The number of the last message of a replay, which has no batch.
END = (-1).to_bytes(8, "big", signed=True)
# Seconds between two checks for replay requests.
POLL_S = 0.1
# Maximum seconds that `close` waits for each of: room in the queue, and ZeroMQ sending
# its own queue.
CLOSE_S = 2.0


class KvEventPublisher:
    """A thread with a PUB socket, and a ROUTER socket to replay missed messages.

    A slow or missing subscriber never delays the engine: messages that do not fit the
    queue are dropped. Subscribers see the gap in the numbers, and can request a replay.
    """

    def __init__(self, config: KvEventsConfig, page_size: int, rank: int = 0):
        """Open the sockets.

        Args:
            rank: Data parallel rank of the engine.

        Raises:
            ConfigError: An address cannot be used, or ZeroMQ or msgpack is missing.
        """
        self._config, self._page_size, self._rank = config, page_size, rank
        self._zmq, self._msgpack = _imported("zmq"), _imported("msgpack")
        self._context = self._zmq.Context()
        self._number = 0
        self._is_closing = False
        self._has_dropped = False
        self._batches: queue.Queue[tuple[int, bytes] | None]
        self._batches = queue.Queue(config.max_queue_size)
        # Guards `_kept`: the engine's thread adds, the publisher's thread replays.
        self._lock = threading.Lock()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        try:
            self._pub = self._open(self._zmq.PUB, "endpoint")
            self._router = (
                None
                if config.replay_endpoint is None
                else self._open(self._zmq.ROUTER, "replay_endpoint", is_bound=True)
            )
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(
            target=self._run, name="jaxspec-kv-events", daemon=True
        )
        self._thread.start()

    def publish(self, events: Iterable[PageEvent]) -> None:
        """Queue events to be sent."""
        encoded = [self._encode(event) for event in events]
        payload = self._msgpack.packb([time.time(), encoded, self._rank])
        batch = (self._number, payload)
        self._number += 1
        with self._lock:
            self._kept.append(batch)
        try:
            self._batches.put_nowait(batch)
        except queue.Full:
            if not self._has_dropped:
                _log.warning(
                    "KV events are produced faster than they are sent: some are dropped"
                )
            self._has_dropped = True

    def close(self) -> None:
        """Wait until queued events are sent and the sockets are closed.

        The thread closes the sockets itself, because a socket may only be used by one
        thread. After a timeout, `close` returns although the thread still runs.
        """
        with contextlib.suppress(queue.Full):
            self._batches.put(None, timeout=CLOSE_S)
        self._thread.join(2 * CLOSE_S)

    def _encode(self, event: PageEvent) -> list[Any]:
        """Return an event as an array in vLLM's format."""
        match event:
            case PagesStored(keys, parent, token_ids):
                size = self._page_size
                stored = [list(keys), parent, list(token_ids), size, None, MEDIUM]
                return ["BlockStored", *stored]
            case PagesRemoved(keys):
                return ["BlockRemoved", list(keys), MEDIUM]
            case _:
                return ["AllBlocksCleared"]

    def _open(self, kind: int, name: str, *, is_bound: bool = False) -> Any:
        address = self._address(getattr(self._config, name))
        socket = self._context.socket(kind)
        socket.set_hwm(self._config.hwm)
        is_bound |= "*" in address or "::" in address or address.startswith("ipc:")
        try:
            (socket.bind if is_bound else socket.connect)(address)
        except self._zmq.ZMQError as error:
            raise ConfigError(
                f"KV events cannot be published at {address}: {error}. Choose another "
                f"{name} of kv_events_config.",
                parameter="kv_events_config",
                value=getattr(self._config, name),
            ) from error
        return socket

    def _address(self, address: str) -> str:
        """Return the address with the port of this engine's data parallel rank."""
        if not self._rank:
            return address
        if address.startswith("ipc:"):
            return f"{address}_dp{self._rank}"
        host, _, port = address.rpartition(":")
        return f"{host}:{int(port) + self._rank}"

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._send_next(POLL_S)
                if self._router is not None and self._router.poll(0):
                    self._replay(self._router)
        finally:
            # PUB sends in a thread of ZeroMQ. Without a linger that thread drops its
            # queue, whose last event says that all pages were removed.
            self._context.destroy(linger=int(CLOSE_S * 1000))

    def _send_next(self, timeout_s: float) -> bool:
        """Send the next queued batch; return whether there was one."""
        try:
            batch = self._batches.get(timeout=timeout_s)
        except queue.Empty:
            return False
        if batch is None:
            self._is_closing = True
            return False
        number, payload = batch
        topic = self._config.topic.encode()
        self._pub.send_multipart((topic, number.to_bytes(8, "big"), payload))
        return True

    def _replay(self, router: Any) -> None:
        """Send the stored batches from a number on to the client that requests them.

        They include batches that were dropped, or are still queued.
        """
        client, *_, requested = router.recv_multipart()
        start = int.from_bytes(requested, "big")
        with self._lock:
            kept = list(self._kept)
        for number, payload in kept:
            if number >= start:
                # First send all new events: there may be thousands of old ones.
                while self._send_next(0.0):
                    pass
                numbered = (number.to_bytes(8, "big"), payload)
                router.send_multipart((client, b"", *numbered))
        router.send_multipart((client, b"", END, b""))


def _imported(name: str) -> Any:
    with needs_extra(
        "kv-events",
        "Publishing KV events",
        hint="Or leave out kv_events_config.",
        parameter="kv_events_config",
        value=True,
    ):
        return importlib.import_module(name)
