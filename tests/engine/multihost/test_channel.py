"""The control channel between the hosts of one target, tested without jax."""

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxspec.config.hosts import HostsConfig
from jaxspec.engine.multihost import channel
from jaxspec.engine.multihost.channel import (
    Connection,
    Followers,
    HostsError,
    Leader,
    shape_of,
    shape_values,
)
from jaxspec.errors import ConfigError, EngineDeadError
from jaxspec.program.plan import Features, StepShape
from jaxspec.program.tree.tree import Tree
from tests.support.processes import free_port

FACTS = {"max_model_len": "128", "sources": "aa"}


@pytest.fixture
def hosts(tmp_path: Path) -> Callable[..., HostsConfig]:
    path = tmp_path / "secret"
    path.write_text("a secret of all processes")
    port = free_port()

    def make(rank: int, **changes: Any) -> HostsConfig:
        given: dict[str, Any] = dict(
            nnodes=3,
            node_rank=rank,
            master_addr="127.0.0.1",
            master_port=port,
            headless=rank > 0,
            secret_file=str(path),
            timeout_s=20,
        )
        return HostsConfig(**(given | changes))

    return make


def together(*functions: Callable[[], Any]) -> list[Any]:
    """Call functions concurrently; return the result or error of each."""
    with ThreadPoolExecutor(len(functions)) as pool:
        calls = [pool.submit(function) for function in functions]
        return [call.exception(30) or call.result() for call in calls]


class Losses(list[str]):
    """Records the reasons passed to `on_loss` when another process ends."""

    def __init__(self) -> None:
        super().__init__()
        self.has_one = threading.Event()

    def __call__(self, reason: str) -> None:
        self.append(reason)
        self.has_one.set()


@contextlib.contextmanager
def three(
    make: Callable[..., HostsConfig],
) -> Iterator[tuple[Followers, list[Leader], Losses]]:
    """Yield a leader, two followers, and the losses that the leader reported."""
    losses = Losses()
    followers, *leaders = together(
        lambda: Followers.gather(make(0), FACTS, losses),
        lambda: Leader.find(make(1), FACTS, Losses()),
        lambda: Leader.find(make(2), FACTS, Losses()),
    )
    for one in (followers, *leaders):
        if isinstance(one, Exception):
            raise one
    try:
        yield followers, leaders, losses
    finally:
        followers.break_off("the test is over")
        for leader in leaders:
            leader.close()


Ends = Callable[..., tuple[Connection, Connection, socket.socket]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Make both ends of a connection; also return the leader's socket."""
    with contextlib.ExitStack() as stack:

        def make(secret: bytes, other: bytes | None = None) -> Any:
            left, right = socket.socketpair()
            for one in (left, right):
                stack.enter_context(one).settimeout(10)
            return *together(
                lambda: Connection(left, secret, is_leader=True),
                lambda: Connection(right, other or secret, is_leader=False),
            ), left

        yield make


def record(connection: Any) -> list[bytes]:
    """Record a connection's messages instead of sending them."""
    sent: list[bytes] = []
    connection._stream = SimpleNamespace(sendall=sent.append)
    return sent


def test_different_secret_is_rejected_on_both_sides(ends: Ends):
    leader, follower, _ = ends(b"s" * 16, b"t" * 16)
    leader.send({})
    follower.send({})
    for one in (leader, follower):
        with pytest.raises(HostsError, match="not signed with the same secret"):
            one.receive()


@pytest.mark.parametrize("place", [0, 7, 12, -1])
def test_changed_byte_is_rejected(ends: Ends, place: int):
    leader, follower, stream = ends(b"s" * 16)
    sent = record(leader)
    leader.send({"launch": 1})
    changed = bytearray(sent[0])
    changed[place] ^= 1
    follower.set_timeout(0.2)
    stream.sendall(bytes(changed))
    with pytest.raises((HostsError, TimeoutError)):
        follower.receive()


def test_repeated_or_omitted_message_is_rejected(ends: Ends):
    leader, follower, stream = ends(b"s" * 16)
    sent = record(leader)
    for number in range(3):
        leader.send({"n": number})
    stream.sendall(sent[0])
    assert follower.receive() == ({"n": 0}, None)
    stream.sendall(sent[2])
    with pytest.raises(HostsError, match="message 2 was received, but 1 was expected"):
        follower.receive()
    again, other, stream = ends(b"s" * 16)
    # Messages signed for another connection have other keys, so they are rejected.
    stream.sendall(sent[0])
    with pytest.raises(HostsError, match="not signed"):
        other.receive()
    again.close()


def test_unsigned_message_cannot_reserve_memory(ends: Ends):
    _, follower, stream = ends(b"s" * 16)
    follower.set_timeout(1)
    stream.sendall(channel._HEADER.pack(0, channel.MAX_FIRST_BYTES, 1))
    with pytest.raises(HostsError, match="too long"):
        follower.receive()
    # After the first signed message, longer messages are accepted.
    leader, follower, stream = ends(b"s" * 16)
    leader.send({})
    assert follower.receive() == ({}, None)
    stream.sendall(channel._HEADER.pack(1, channel.MAX_FIRST_BYTES, 1))
    follower.set_timeout(0.1)
    with pytest.raises(TimeoutError):
        follower.receive()


def test_slow_sender_times_out(ends: Ends):
    _, follower, stream = ends(b"s" * 16)
    over = threading.Event()

    def drip() -> None:
        while not over.wait(0.05):
            stream.send(b"\0")

    def receive() -> None:
        follower.set_timeout(0.3)
        try:
            follower.receive()
        finally:
            took_s.append(time.monotonic() - start)
            over.set()

    took_s, start = list[float](), time.monotonic()
    _, result = together(drip, receive)
    assert isinstance(result, TimeoutError) and took_s[0] < 2


def test_commands_reach_all_and_answers_are_by_rank(hosts: Any):
    with three(hosts) as (followers, leaders, losses):
        for connection, _ in followers._connections.values():
            assert connection._sends != connection._receives, "one key per direction"
        vector = np.array([0, -1, 2**31 - 1, -(2**31)], np.int32)
        number = followers.send("launch", {"x": 1}, vector)
        last = followers.send("compile", {"y": []})
        for index, leader in enumerate(leaders):
            command = leader.receive()
            assert command[:3] == (number, "launch", {"x": 1})
            assert command.vector is not None and command.vector.dtype == np.int32
            assert command.vector.tolist() == vector.tolist()
            leader.answer(command, {"rank": index + 1})
            assert leader.receive() == (last, "compile", {"y": []}, None)
        assert followers.wait(number) == [{"rank": 1}, {"rank": 2}]
        followers.end()
        assert [leader.receive().name for leader in leaders] == ["end", "end"]
        with pytest.raises(EngineDeadError, match="has ended"):
            followers.send("launch", {})
        time.sleep(0.2)  # time in which a thread would report a closed connection
        assert not losses
        assert [leader._on_loss for leader in leaders] == [[], []]


def test_all_followers_receive_the_same_order(
    hosts: Any, monkeypatch: pytest.MonkeyPatch
):
    send_one = Connection.send

    def slow(connection: Connection, *parts: Any) -> None:
        time.sleep(0.001)  # let other threads run
        send_one(connection, *parts)

    with three(hosts) as (followers, leaders, _):
        monkeypatch.setattr(Connection, "send", slow)

        def send() -> list[int]:
            return [followers.send("launch", {}) for _ in range(20)]

        def receive(leader: Leader) -> list[int]:
            return [leader.receive().number for _ in range(60)]

        *sent, first, second = together(
            *[send] * 3, *[lambda one=one: receive(one) for one in leaders]
        )
        assert sorted(sum(sent, [])) == [*range(1, 61)]
        assert first == second == [*range(1, 61)]


@pytest.mark.parametrize("reason", ["no memory is left", ""])
def test_end_of_a_follower_is_reported_and_ends_waits(hosts: Any, reason: str):
    with three(hosts) as (followers, leaders, losses):
        number = followers.send("compile", {})
        if reason:
            leaders[1].fail(reason)
        leaders[1].close()
        assert losses.has_one.wait(10)
        assert "node_rank=2" in losses[0] and reason in losses[0]
        with pytest.raises(EngineDeadError, match=r"node_rank=2 \(127.0.0.1:\d+\) has"):
            followers.wait(number)
        with pytest.raises(EngineDeadError, match="node_rank=2"):
            followers.send("launch", {})


def test_late_answer_does_not_lose_the_last_command():
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname(), timeout=10)
        far, _ = server.accept()
    losses = Losses()
    with near, far:
        ours, theirs = together(
            lambda: Connection(far, b"s" * 16, is_leader=True),
            lambda: Connection(near, b"s" * 16, is_leader=False),
        )
        followers = Followers({1: (ours, "near")}, losses)
        number = followers.send("compile", {})
        followers.end()
        # Two messages are sent: the first makes the other end reset the connection, and
        # sending the second reports the reset.
        for _ in range(2):
            theirs.send({"number": number, "values": {}})
            time.sleep(0.1)
        names = [theirs.receive()[0]["name"] for _ in range(2)]
        assert names == ["compile", "end"]
        with pytest.raises(EOFError):
            theirs.receive()
        theirs.close()
        for listener in followers._listeners:
            listener.join(10)
            assert not listener.is_alive()
    assert not losses


def test_follower_that_never_closes_is_disconnected(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(channel, "END_S", 0.1)
    ours, _, stream = ends(b"s" * 16)
    ours.set_timeout(None)
    followers = Followers({1: (ours, "near")}, losses := Losses())
    followers.end()
    (listener,) = followers._listeners
    listener.join(10)
    assert not listener.is_alive() and not losses


def test_silent_host_is_detected_by_both_sides(hosts: Any):
    with three(hosts) as (followers, leaders, _):
        connections = [one for one, _ in followers._connections.values()]
        for one in [*connections, *(leader._connection for leader in leaders)]:
            stream = one._stream
            assert stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle, interval, count = (
                stream.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
                for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
            )
            assert idle + interval * count == 3 * channel.HEARTBEAT_S


def test_failure_is_reported_as_end_of_its_process(
    hosts: Any, monkeypatch: pytest.MonkeyPatch
):
    """The leader's collective fails a moment before the connection is closed."""
    with three(hosts) as (followers, leaders, losses):
        monkeypatch.setattr("jaxspec.engine.multihost.channel.NOTICE_S", 10)
        breaking = threading.Thread(
            target=followers.break_off,
            args=["gloo failed"],
            kwargs={"may_be_loss": True},
        )
        breaking.start()
        time.sleep(0.1)
        # The collective failed on the other host too, so no process has ended.
        leaders[0].fail("gloo failed")
        time.sleep(0.1)
        assert not losses
        leaders[1].close()
        breaking.join(5)
        assert not breaking.is_alive()
        assert losses.has_one.wait(10)
        assert len(losses) == 1 and "node_rank=2" in losses[0]


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_leaders_own_failure_closes_all_connections(
    hosts: Any, monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
):
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with three(hosts) as (followers, leaders, losses):
        if is_interrupted:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(followers._changed, "wait_for", interrupt)
                followers.break_off("no memory is left", may_be_loss=True)
        else:
            followers.break_off("no memory is left", may_be_loss=True)
        for leader in leaders:
            with pytest.raises(EOFError):
                leader.receive()
        with pytest.raises(EngineDeadError, match="no memory is left"):
            followers.send("launch", {})
        assert not losses


def test_end_of_the_leader_is_reported(hosts: Any):
    with three(hosts) as (followers, leaders, _):
        notified, left = (one._on_loss for one in leaders)
        assert isinstance(notified, Losses) and isinstance(left, Losses)
        leaders[1].close()
        with pytest.raises(EOFError):
            leaders[1].receive()
        followers.break_off("it is out of step")
        with pytest.raises(EOFError):
            leaders[0].receive()
        assert notified.has_one.wait(10)
        assert notified == ["The leader has ended: the connection was closed."]
        assert not left, "it closed the connection itself"


def test_process_without_secret_is_rejected(hosts: Any, tmp_path: Path):
    other = tmp_path / "other"
    other.write_text("another secret of somebody")
    stranger, errors = hosts(1, secret_file=str(other)), list[str]()

    def arrive() -> list[Leader]:
        for _ in range(2):
            with channel._reach(stranger, "", time.monotonic() + 10) as plain:
                plain.sendall(b"GET / HTTP/1.1\r\nHost: leader\r\n\r\n" + b" " * 64)
                plain.recv(1)
        with pytest.raises(ConfigError) as caught:
            Leader.find(stranger, FACTS)
        errors.append(str(caught.value))
        return together(
            lambda: Leader.find(hosts(1), FACTS), lambda: Leader.find(hosts(2), FACTS)
        )

    followers, leaders = together(
        lambda: Followers.gather(hosts(0), FACTS, Losses()), arrive
    )
    assert isinstance(followers, Followers)
    assert "hosts_secret_file must have the same content" in errors[0]
    followers.end()
    for leader in leaders:
        leader.close()


def test_silent_connections_do_not_block_followers(
    hosts: Any, monkeypatch: pytest.MonkeyPatch
):
    listening, strangers = channel._listening, list[socket.socket]()

    def listen(config: HostsConfig) -> socket.socket:
        made = listening(config)
        for _ in range(3):  # connects before all other processes
            strangers.append(socket.create_connection(made.getsockname()))
        return made

    monkeypatch.setattr(channel, "_listening", listen)
    monkeypatch.setattr(channel, "HELLO_S", 5)
    start = time.monotonic()
    with three(hosts):
        assert time.monotonic() - start < 4
    for stranger in strangers:
        stranger.settimeout(5)
        with stranger, contextlib.suppress(ConnectionResetError):
            while stranger.recv(64):  # reads until the leader disconnects it
                pass


def test_silent_leader_is_not_reported_as_wrong_secret(
    hosts: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(channel, "HELLO_S", 0.1)
    config = hosts(1, timeout_s=1)
    with socket.create_server(("127.0.0.1", config.plans_port)):
        start = time.monotonic()
        with pytest.raises(ConfigError, match="has not responded.*node_rank is 0"):
            Leader.find(config, FACTS)
        # The timeout is as long as a leader may wait for other processes.
        assert time.monotonic() - start > 0.9


@pytest.mark.parametrize(
    ("rank", "changes", "messages"),
    [
        (
            *(2, {"max_model_len": "64"}),
            ("node_rank=2", "max_model_len: 64 there, and 128 at the leader"),
        ),
        (1, {}, ("Two processes have node_rank=1: 127.0.0.1:",)),
    ],
)
def test_difference_or_duplicate_rank_is_reported_to_all(
    hosts: Any, monkeypatch: pytest.MonkeyPatch, rank: int, changes: Any, messages: Any
):
    accept, has_one = channel._accept, threading.Event()

    def accepted(*arguments: Any) -> None:
        accept(*arguments)
        has_one.set()

    def find_last() -> Leader:
        assert has_one.wait(10)
        return Leader.find(hosts(rank), FACTS | changes)

    monkeypatch.setattr(channel, "_accept", accepted)
    results = together(
        lambda: Followers.gather(hosts(0), FACTS),
        lambda: Leader.find(hosts(1), FACTS),
        find_last,
    )
    for result in results:
        assert isinstance(result, ConfigError), result
        assert all(message in str(result) for message in messages)


@pytest.mark.parametrize("is_complete", [False, True])
def test_restarted_process_replaces_itself(
    hosts: Any, monkeypatch: pytest.MonkeyPatch, is_complete: bool
):
    accept, num_accepted = channel._accept, threading.Semaphore(0)

    def accepted(*arguments: Any) -> None:
        accept(*arguments)
        num_accepted.release()

    def arrive() -> list[Leader]:
        config = hosts(1)
        secret = config.read_secret()
        with channel._reach(config, "", time.monotonic() + 10) as stream:
            first = Connection(stream, secret, is_leader=False)
            first.send({"node_rank": 1, "facts": FACTS})
            assert num_accepted.acquire(timeout=10)

        def find(rank: int, *, waits: bool) -> Leader:
            if waits:
                assert num_accepted.acquire(timeout=10)
            return Leader.find(hosts(rank), FACTS, Losses())

        # The other process connects before or after the restarted one.
        return together(
            lambda: find(1, waits=is_complete), lambda: find(2, waits=not is_complete)
        )

    monkeypatch.setattr(channel, "_accept", accepted)
    followers, leaders = together(
        lambda: Followers.gather(hosts(0), FACTS, Losses()), arrive
    )
    assert isinstance(followers, Followers), followers
    followers.send("launch", {})
    for leader in leaders:
        assert leader.receive().name == "launch"
    followers.break_off("the test is over")
    for leader in leaders:
        leader.close()


def test_process_that_ends_during_admission_is_named(
    hosts: Any, monkeypatch: pytest.MonkeyPatch
):
    send = Connection.send

    def fail_last(connection: Connection, content: Any, vector: bytes = b"") -> None:
        if content == {"accepted": True}:
            confirmed.append(connection)
            if len(confirmed) == 2:
                raise ConnectionResetError("reset by peer")
        send(connection, content, vector)

    confirmed: list[Connection] = []
    monkeypatch.setattr(Connection, "send", fail_last)
    result, *others = together(
        lambda: Followers.gather(hosts(0), FACTS, Losses()),
        lambda: Leader.find(hosts(1), FACTS, Losses()),
        lambda: Leader.find(hosts(2), FACTS, Losses()),
    )
    # One follower was already accepted, and is also sent the reason.
    (leader,) = [one for one in others if isinstance(one, Leader)]
    with pytest.raises(EOFError) as ended:
        leader.receive()
    leader.close()
    failed = [one for one in others if one is not leader]
    for one in (result, *failed):
        assert isinstance(one, ConfigError), one
    for one in (result, *failed, ended.value):
        assert "ended before all processes had connected: reset by peer" in str(one)
    assert isinstance(leader._on_loss, Losses) and len(leader._on_loss) == 1
    assert re.search(r"node_rank=[12] \(127\.0\.0\.1:\d+\)", str(result))


def test_missing_ranks_are_named_with_the_address(hosts: Any):
    config = hosts(0, timeout_s=1)
    where = f"127.0.0.1:{config.plans_port}"
    leader, follower = together(
        lambda: Followers.gather(config, FACTS), lambda: Leader.find(hosts(2), FACTS)
    )
    for result in (leader, follower):
        message = f"After 1 s no process has connected to {where} with node_rank 1:"
        assert isinstance(result, ConfigError) and message in str(result)
    with pytest.raises(
        ConfigError, match=f"After 1 s no process listens on {where}: .*ref"
    ):
        Leader.find(hosts(1, timeout_s=1), FACTS)
    with pytest.raises(
        ConfigError, match=r"cannot listen on 192\.0\.2\.1:.*master_addr"
    ):
        Followers.gather(hosts(0, master_addr="192.0.2.1"), FACTS)


def test_unknown_host_name_is_retried(hosts: Any, monkeypatch: pytest.MonkeyPatch):
    look_up, calls = socket.getaddrinfo, list[int]()

    def slow(host: Any, port: Any, **options: Any) -> Any:
        calls.append(port)
        if len(calls) < 3:
            raise socket.gaierror("unknown")
        return look_up("127.0.0.1", port, **options)

    monkeypatch.setattr(channel.socket, "getaddrinfo", slow)
    with channel._listening(hosts(0, master_addr="leader.group")) as listener:
        assert listener.getsockname()[1] == hosts(0).plans_port
    assert len(calls) == 3
    calls[:] = []
    monkeypatch.setattr(channel, "RETRY_S", 2)
    with pytest.raises(ConfigError, match="cannot listen on leader.group:.*unknown"):
        channel._listening(hosts(0, master_addr="leader.group", timeout_s=1))


@pytest.mark.parametrize("template", [None, Tree((-1, 0, -1))])
def test_shapes_survive_the_channel(template: Any):
    shape = StepShape(
        num_seqs=8,
        num_levels=2,
        max_prompt_tokens=64,
        features=Features(all_greedy=True, num_logprobs=3),
        max_rounds=4,
        template=template,
    )
    again = shape_of(json.loads(json.dumps(shape_values(shape))))
    assert again == shape and hash(again) == hash(shape)
