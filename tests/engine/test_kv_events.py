"""KV events as gateways receive them: format, sequence numbers, and replays."""

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from jaxspec.config.kv_events import KvEventsConfig
from jaxspec.engine import kv_events
from jaxspec.engine.kv_events import END, KvEventPublisher
from jaxspec.engine.scheduling.kv_cache import page_keys, root_key
from jaxspec.engine.scheduling.page_events import (
    PagesCleared,
    PagesRemoved,
    PagesStored,
)
from jaxspec.errors import ConfigError
from jaxspec.sampling_params import SamplingParams
from tests.support.fake_engines import PROMPT, make_fake_engine, run_all

LIMIT_MS = 10_000
TOPIC = "kv@pod@gemma"
EVENTS = [
    PagesCleared(),
    PagesStored((b"k1", b"k2"), None, (1, 2, 3, 4)),
    PagesRemoved((b"k1",)),
]


class Subscriber:
    """A subscriber that binds: publishers connect to an address without "*"."""

    def __init__(self, context: Any):
        self._socket = context.socket(zmq.SUB)
        self._socket.subscribe(b"kv@")
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.port: int = port
        self.config = {
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://127.0.0.1:{port}",
            "topic": TOPIC,
        }

    def receive(self) -> tuple[int, Any]:
        """Return the sequence number of the next batch, and the batch."""
        assert self._socket.poll(LIMIT_MS), "nothing came"
        topic, number, payload = self._socket.recv_multipart()
        assert (topic, len(number)) == (TOPIC.encode(), 8)
        return int.from_bytes(number, "big"), msgpack.unpackb(payload)

    def is_silent(self) -> bool:
        return not self._socket.poll(300)

    def wait_for(self, publisher: KvEventPublisher) -> int:
        """Publish until the subscriber receives a batch; return its sequence number.

        ZeroMQ drops messages that are sent before the subscription arrives.
        """
        for _ in range(200):
            publisher.publish([PagesCleared()])
            if self._socket.poll(50):
                break
        while True:
            number, _ = self.receive()
            if self.is_silent():
                return number


@pytest.fixture
def context() -> Iterator[Any]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def subscriber(context: Any) -> Subscriber:
    return Subscriber(context)


def open_publisher(config: dict[str, Any], rank: int = 0) -> Any:
    publisher = KvEventPublisher(KvEventsConfig.read(config), 2, rank)
    return contextlib.closing(publisher)


def test_batches_have_vllms_format_and_each_engine_has_its_port(subscriber: Subscriber):
    address = f"tcp://127.0.0.1:{subscriber.port - 3}"
    with open_publisher(subscriber.config | {"endpoint": address}, rank=3) as publisher:
        number = subscriber.wait_for(publisher)
        publisher.publish(EVENTS)
        publisher.publish([PagesStored((b"k3",), b"k2", (5, 6))])
        first, (time_s, events, rank) = subscriber.receive()
        second, (_, more, _) = subscriber.receive()
    assert (first, second) == (number + 1, number + 2)
    assert isinstance(time_s, float)
    assert rank == 3
    assert events == [
        ["AllBlocksCleared"],
        ["BlockStored", [b"k1", b"k2"], None, [1, 2, 3, 4], 2, None, "GPU"],
        ["BlockRemoved", [b"k1"], "GPU"],
    ]
    assert more == [["BlockStored", [b"k3"], b"k2", [5, 6], 2, None, "GPU"]]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    """Return a configuration with the addresses of socket files."""
    # Paths of Unix socket files must be short.
    folder = Path("/tmp") if len(str(tmp_path)) > 80 else tmp_path
    return {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay",
    }


class Held:
    """A socket that sends nothing before `may_continue` is set."""

    def __init__(self, send: Callable[[Any], object]):
        self.may_continue, self._send = threading.Event(), send

    def send_multipart(self, parts: Any) -> None:
        assert self.may_continue.wait(LIMIT_MS / 1000)
        self._send(parts)


def replayed(asking: Any, start: int) -> Iterator[tuple[int, Any]]:
    """Request a replay; yield the sequence number and the events of each batch."""
    asking.send_multipart((b"", start.to_bytes(8, "big")))
    while True:
        assert asking.poll(LIMIT_MS)
        _, number, payload = asking.recv_multipart()
        if number == END:
            return
        yield int.from_bytes(number, "big"), msgpack.unpackb(payload)[1]


def test_missed_messages_are_replayed(context: Any, files: dict[str, Any]):
    with open_publisher(files | {"buffer_steps": 3}) as publisher:
        for number in range(5):
            publisher.publish([PagesRemoved((bytes([number]),))])
        found = []
        with context.socket(zmq.DEALER) as asking:
            asking.connect(files["replay_endpoint"])
            for start in (4, 0):
                found += replayed(asking, start)
    # The publisher stores `buffer_steps` batches.
    assert found == [
        (number, [["BlockRemoved", [bytes([number])], "GPU"]])
        for number in (4, 2, 3, 4)
    ]


def test_messages_beyond_the_queue_are_dropped_but_replayed(context, files, caplog):
    with open_publisher(files | {"max_queue_size": 1}) as publisher:
        sent: list[Any] = []
        pub, publisher._pub = publisher._pub, Held(sent.append)
        for _ in range(5):
            publisher.publish([PagesCleared()])
        publisher._pub.may_continue.set()
        with context.socket(zmq.DEALER) as asking:
            asking.connect(files["replay_endpoint"])
            numbers = [number for number, _ in replayed(asking, 0)]
        publisher._pub = Held(sent.append)
        publisher._pub.may_continue.set()
        publisher.publish([PagesCleared()])
    assert int.from_bytes(sent[-1][1], "big") == 5  # live readers see the gap
    assert numbers == [0, 1, 2, 3, 4]
    assert 2 <= len(sent) <= 3
    assert "some are dropped" in caplog.text
    assert pub.closed


def test_a_replay_does_not_delay_live_events(files: dict[str, Any]):
    order: list[tuple[str, int]] = []
    is_done = threading.Event()

    class Pub:
        def send_multipart(self, parts: Any) -> None:
            order.append(("live", int.from_bytes(parts[1], "big")))

    class Router:
        def poll(self, timeout: int) -> bool:
            return len(order) == 3

        def recv_multipart(self) -> Any:
            return b"client", b"", bytes(8)

        def send_multipart(self, parts: Any) -> None:
            number = int.from_bytes(parts[2], "big", signed=True)
            order.append(("again", number))
            if number == 0:
                publisher.publish([PagesCleared()])
            if parts[2] == END:
                is_done.set()

    del files["replay_endpoint"]
    with open_publisher(files) as publisher:
        pub, publisher._pub = publisher._pub, Pub()
        publisher._router = Router()
        for _ in range(3):
            publisher.publish([PagesCleared()])
        assert is_done.wait(LIMIT_MS / 1000)
    assert pub.closed
    live, again = [[(kind, n) for n in range(-1, 4)] for kind in ("live", "again")]
    assert order == [*live[1:4], again[1], live[4], *again[2:4], again[0]]


def test_engine_publishes_its_cached_pages(subscriber: Subscriber):
    config = KvEventsConfig.read(subscriber.config)
    engine, _ = make_fake_engine(num_draft_tokens=3, kv_events=config)
    assert engine._publisher is not None
    number = subscriber.wait_for(engine._publisher)
    prompt = {"prompt_token_ids": [2, 3, 4] * 6}
    engine.add_request("one", prompt, SamplingParams(max_tokens=9, ignore_eos=True))
    run_all(engine)
    size = engine.config.page_size
    tokens: list[int] = []
    events: list[Any] = []
    while not subscriber.is_silent():
        number, (_, batch, _) = subscriber.receive()
        events += batch
    assert events.pop(0) == ["AllBlocksCleared"]
    for kind, _, _, token_ids, page_size, *_ in events:
        assert (kind, page_size) == ("BlockStored", size)
        tokens += token_ids
    # The pages of the prompt and answer have the order in which the next turn looks
    # them up.
    assert tokens[:18] == prompt["prompt_token_ids"]
    assert len(tokens) // size == (18 + 9 - 1) // size
    kept = set(engine.scheduler.pool._page_of)
    assert set(page_keys(root_key("all", ""), tokens, size)) == kept
    assert engine.reset_prefix_cache()
    number_received, (_, batch, _) = subscriber.receive()
    assert (number_received, batch) == (number + 1, [["AllBlocksCleared"]])
    engine.shutdown()
    assert engine._publisher is None


def test_no_events_by_default():
    engine, _ = make_fake_engine()
    assert engine._publisher is engine._page_events is None
    engine.add_request("one", PROMPT, SamplingParams(max_tokens=4))
    run_all(engine)


def test_rejects_address_in_use(subscriber: Subscriber):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        config = subscriber.config | {"replay_endpoint": address}
        message = f"published at {address}.*replay_endpoint"
        with pytest.raises(ConfigError, match=message):
            KvEventPublisher(KvEventsConfig.read(config), 2)


@pytest.mark.parametrize("name", ["zmq", "msgpack"])
def test_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, name, None)  # makes `import zmq` fail
    on = KvEventsConfig(enable_kv_cache_events=True)
    with pytest.raises(ConfigError, match=rf"{name}.*decoding\[kv-events\]"):
        KvEventPublisher(on, 2)


def test_queued_messages_are_sent_before_close(subscriber: Subscriber):
    tokens = tuple(range(200_000))
    with open_publisher(subscriber.config) as publisher:
        number = subscriber.wait_for(publisher)
        for _ in range(30):
            publisher.publish([PagesStored((b"k",), None, tokens)])
        publisher.publish([PagesCleared()])
    numbers = [subscriber.receive()[0] for _ in range(31)]
    assert numbers == list(range(number + 1, number + 32))


def test_sockets_stay_open_until_a_slow_thread_ends(subscriber, monkeypatch):
    monkeypatch.setattr(kv_events, "CLOSE_S", 0.05)
    publisher = KvEventPublisher(KvEventsConfig.read(subscriber.config), 2)
    held = Held(print)
    pub, publisher._pub = publisher._pub, held
    publisher.publish([PagesCleared()])
    publisher.close()
    assert publisher._thread.is_alive()
    assert not pub.closed
    held.may_continue.set()
    publisher._thread.join(LIMIT_MS / 1000)
    assert pub.closed
    assert publisher._context.closed
