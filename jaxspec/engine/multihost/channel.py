"""The control channel between the processes of one target: signed, ordered commands.

The leader has the engine. It sends each command (a program to compile, a launch with
its plan, ...) to all followers before it runs the command itself. When one process
ends, all others end too; Kubernetes or the user restarts all of them.

A message consists of JSON and a vector of int32. Each message is numbered, and signed
with a key that both sides derive from a shared secret and from a random number of each
side: a process without the secret cannot add, change, repeat or omit one. Nothing is
encrypted.
"""

import dataclasses
import hmac
import json
import logging
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jaxspec.config.hosts import HostsConfig
from jaxspec.engine.multihost.facts import difference
from jaxspec.errors import ConfigError, EngineDeadError
from jaxspec.program.plan import Features, StepShape
from jaxspec.program.tree.tree import Tree

T = TypeVar("T")

_log = logging.getLogger(__name__)

# A process that ends is noticed at once, because its connection closes. A host that is
# silent for three heartbeats counts as lost: by jax.distributed once all processes have
# joined (`join` in runner.py), by TCP keepalive before that.
HEARTBEAT_S = 10
# Exit code of a process that ends because another one has. jax.distributed may end a
# follower first, with SIGABRT: jax has no setting for that.
HOST_LOST = 1
# Seconds that the leader waits, after a failure of its own, for a connection to close:
# a collective may fail before the connection to the lost process closes, and that loss
# is the reason to report.
NOTICE_S = 1.0
# Maximum seconds for a new connection to send its whole, signed hello.
HELLO_S = 10
# Seconds for which the leader reads answers after END; jax's own shutdown of all
# processes takes up to 3 * HEARTBEAT_S.
END_S = 4 * HEARTBEAT_S
# Seconds between two attempts to reach a leader that does not listen yet.
RETRY_S = 0.25
# Seconds between the leader's checks for new hellos.
POLL_S = 0.05
# Maximum number of open connections without a hello, beyond the expected followers.
MAX_STRANGERS = 64
# The last command.
END = "end"
MAGIC = b"jaxspec hosts 1\n"
NONCE_BYTES = TAG_BYTES = 32
# A message has these parts: its number, the bytes of its JSON, the bytes of its vector,
# the JSON, the vector, and the signature.
_HEADER = struct.Struct("!QII")
# Maximum bytes of a message, far above the size of any plan.
MAX_MESSAGE_BYTES = 2**28
# Limit of the first message, whose memory is reserved before its signature is checked.
MAX_FIRST_BYTES = 2**20
_VECTOR = np.dtype("<i4")


class HostsError(OSError):
    """A message that is incomplete, or not from a process with the secret."""


class Command(NamedTuple):
    """A command that the leader and all followers run next."""

    number: int
    name: str
    values: dict[str, Any]
    vector: np.ndarray | None


class Connection:
    """Signed, numbered messages over a connected socket."""

    def __init__(
        self,
        stream: socket.socket,
        secret: bytes,
        *,
        is_leader: bool,
        deadline: float | None = None,
    ):
        """Exchange random numbers, and derive a key for each direction.

        Args:
            deadline: Time by `time.monotonic` at which reading fails; None: the
                socket's timeout.

        Raises:
            HostsError: The other side uses another protocol.
            EOFError, OSError: It has closed the connection, or does not answer in time.
        """
        self._stream, self._deadline = stream, deadline
        self._num_sent = self._num_received = 0
        own_nonce = secrets.token_bytes(NONCE_BYTES)
        stream.sendall(MAGIC + own_nonce)
        greeting = self._read(len(MAGIC) + NONCE_BYTES)
        if not greeting.startswith(MAGIC):
            raise HostsError(
                "the other process does not run this version of jaxspec; install the "
                "same version on all hosts"
            )
        other = greeting[len(MAGIC) :]
        nonces = own_nonce + other if is_leader else other + own_nonce
        down = _sign(secret, b"from the leader" + nonces)
        up = _sign(secret, b"to the leader" + nonces)
        self._sends, self._receives = (down, up) if is_leader else (up, down)

    def send(self, content: Mapping[str, Any], vector: bytes = b"") -> None:
        """Write one message.

        Raises:
            OSError: The connection is closed.
        """
        text = json.dumps(content, separators=(",", ":")).encode()
        header = _HEADER.pack(self._num_sent, len(text), len(vector))
        self._num_sent += 1
        body = header + text + vector
        self._stream.sendall(body + _sign(self._sends, body))

    def receive(self) -> tuple[dict[str, Any], np.ndarray | None]:
        """Read one message.

        Raises:
            EOFError: The other side has closed the connection.
            HostsError: The message is not signed with the secret, or is out of order.
            OSError: The connection is broken, or the deadline has passed.
        """
        header = self._read(_HEADER.size)
        number, num_content, num_vector = _HEADER.unpack(header)
        max_bytes = MAX_MESSAGE_BYTES if self._num_received else MAX_FIRST_BYTES
        if num_content + num_vector > max_bytes:
            raise HostsError("the message is too long")
        body = header + self._read(num_content + num_vector)
        tag = self._read(TAG_BYTES)
        if not hmac.compare_digest(tag, _sign(self._receives, body)):
            raise HostsError("the message is not signed with the same secret")
        if number != self._num_received:
            raise HostsError(
                f"message {number} was received, but {self._num_received} was expected"
            )
        self._num_received += 1
        end = _HEADER.size + num_content
        vector = None
        if num_vector:
            vector = np.frombuffer(body, _VECTOR, offset=end).astype(np.int32)
        return json.loads(body[_HEADER.size : end]), vector

    def is_gone(self) -> bool:
        """Return whether the other side has closed the connection.

        Must not be called while a thread receives.
        """
        try:
            flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
            return not self._stream.recv(1, flags)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def finish(self) -> None:
        """Close the sending direction only."""
        with suppress(OSError):  # the other side may have closed it
            self._stream.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection; a thread that receives gets EOFError."""
        with suppress(OSError):  # the other side may have closed it
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()

    def refuse(self, reason: str) -> None:
        """Send why the other side cannot take part, and close the connection."""
        with suppress(OSError):  # it may have gone
            self.send({"refused": reason})
        self.close()

    def set_timeout(self, seconds: float | int | None) -> None:
        """Set the time from now after which reading fails; None: never."""
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._stream.settimeout(seconds)

    def _read(self, count: int) -> bytes:
        parts, left = [], count
        while left:
            if self._deadline is not None:
                # The socket's own timeout would begin anew with every byte.
                remaining = self._deadline - time.monotonic()
                self._stream.settimeout(max(remaining, 0.001))
            received = self._stream.recv(min(left, 2**20))
            if not received:
                raise EOFError("the connection was closed")
            parts.append(received)
            left -= len(received)
        return b"".join(parts)


def _sign(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")


def _set_options(stream: socket.socket) -> None:
    """Send without delay, and notice a silent host after three heartbeats."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Systems without these options notice a silent host only after hours.
    for name, value in (
        ("TCP_KEEPIDLE", HEARTBEAT_S),
        ("TCP_KEEPINTVL", HEARTBEAT_S),
        ("TCP_KEEPCNT", 2),
    ):
        if hasattr(socket, name):
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _retry(call: Callable[[], T], error: type[OSError], deadline: float) -> T:
    """Call until no `error` is raised; raise it once the deadline has passed."""
    while True:
        try:
            return call()
        except error:
            if time.monotonic() + RETRY_S > deadline:
                raise
            time.sleep(RETRY_S)


def shape_values(shape: StepShape) -> dict[str, Any]:
    """Return a shape as JSON; `shape_of` reads it."""
    return dataclasses.asdict(shape)


def shape_of(values: Mapping[str, Any]) -> StepShape:
    """Return the shape that `shape_values` has written."""
    features, template = Features(**values["features"]), values["template"]
    if template is not None:
        template = Tree(parents=tuple(template["parents"]))
    return StepShape(**{**values, "features": features, "template": template})


def end_process(reason: str) -> None:
    """End this process, which may wait in a collective for a process that has ended.

    XLA cannot cancel a collective, so nothing can be closed in order.
    """
    _log.critical("%s This process ends too: restart all processes.", reason)
    logging.shutdown()
    os._exit(HOST_LOST)


class Followers:
    """The leader's side: sends commands to all followers.

    Any thread may send. A command is sent before the leader runs it, because a
    collective waits for all processes.
    """

    def __init__(
        self,
        connections: Mapping[int, tuple[Connection, str]],
        on_loss: Callable[[str], None] = end_process,
    ):
        """Start to listen to the followers.

        Args:
            connections: Connection and address of each rank.
            on_loss: Called in a thread, with the reason, when a follower has ended.
        """
        self._connections, self._on_loss = dict(connections), on_loss
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._answers: dict[int, dict[int, dict[str, Any]]] = {}
        self._number = 0
        self._ended: str | None = None
        self._is_over = self._is_breaking_off = False
        self._listeners = [
            threading.Thread(
                target=self._listen, args=(rank,), name="jaxspec-hosts", daemon=True
            )
            for rank in self._connections
        ]
        for listener in self._listeners:
            listener.start()

    def __len__(self) -> int:
        return len(self._connections)

    @classmethod
    def gather(
        cls,
        hosts: HostsConfig,
        facts: Mapping[str, str],
        on_loss: Callable[[str], None] = end_process,
    ) -> "Followers":
        """Wait for all processes, and compare their facts with the leader's.

        Raises:
            ConfigError: A process is missing, differs or has ended, two have one rank,
                or the leader cannot listen on its address. All followers get the
                reason.
        """
        secret = hosts.read_secret()
        connected: dict[int, tuple[Connection, str]] = {}
        with _listening(hosts) as listener:
            try:
                _accept_all(listener, hosts, secret, facts, connected)
                _confirm_all(connected)
            except ConfigError as error:
                for connection, _ in connected.values():
                    connection.refuse(str(error))
                raise
        _log.info("All %d processes have connected", hosts.nnodes)
        return cls(connected, on_loss)

    def send(
        self, name: str, values: Mapping[str, Any], vector: np.ndarray | None = None
    ) -> int:
        """Send a command to all followers; return its number.

        Raises:
            EngineDeadError: A process has ended.
        """
        data = b"" if vector is None else vector.astype(_VECTOR).tobytes()
        with self._sending:
            if self._ended is not None:
                raise EngineDeadError(self._ended)
            self._number += 1
            content = {"number": self._number, "name": name, "values": values}
            for rank, (connection, _) in self._connections.items():
                try:
                    connection.send(content, data)
                except OSError as error:
                    self._lose(rank, str(error))
                    raise EngineDeadError(self._ended or "") from error
            return self._number

    def wait(self, number: int) -> list[dict[str, Any]]:
        """Wait until all followers have answered a command; return answers by rank.

        After `end`, the list is empty.

        Raises:
            EngineDeadError: A process has ended.
        """
        with self._changed:
            while len(self._answers.get(number, {})) < len(self._connections):
                if self._is_over:
                    return []
                if self._ended is not None:
                    raise EngineDeadError(self._ended)
                self._changed.wait()
            answers = self._answers.pop(number)
        return [answers[rank] for rank in sorted(answers)]

    def end(self) -> None:
        """End all followers in order; nothing can be sent afterwards.

        Answers are read until the followers close: an answer to a closed socket would
        reset the connection, and the last command could be lost.
        """
        try:
            self.send(END, {})
        except EngineDeadError:
            return  # they have ended already
        self._is_over = True
        if not self._stop("The leader's engine has ended, and so have its followers."):
            return
        for connection, _ in self._connections.values():
            connection.finish()
        threading.Thread(
            target=self._close_last, name="jaxspec-hosts", daemon=True
        ).start()

    def _close_last(self) -> None:
        deadline = time.monotonic() + END_S
        for listener in self._listeners:
            listener.join(max(deadline - time.monotonic(), 0))
        for connection, _ in self._connections.values():
            connection.close()

    def break_off(self, reason: str, *, may_be_loss: bool = False) -> None:
        """End all followers at once, as the leader has not run a command that it sent.

        Args:
            may_be_loss: The failure may come from the end of another process. Its
                connection then closes within `NOTICE_S`, and that loss is reported in
                place of `reason`. A failure that a follower reports meanwhile is not a
                loss.
        """
        if may_be_loss and self._ended is None:
            _log.error("%s", reason)
        self._is_breaking_off = True
        try:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._ended is not None, NOTICE_S if may_be_loss else 0
                )
        finally:
            self._close(reason)

    def _close(self, reason: str) -> bool:
        """Close all connections; return False if they were closed before."""
        if not self._stop(reason):
            return False
        for connection, _ in self._connections.values():
            connection.close()
        return True

    def _stop(self, reason: str) -> bool:
        """Send no more commands; return False if sending had stopped before."""
        with self._changed:
            if self._ended is not None:
                return False
            self._ended = reason
            self._changed.notify_all()
        return True

    def _listen(self, rank: int) -> None:
        """Collect a follower's answers until its connection closes."""
        connection = self._connections[rank][0]
        while True:
            try:
                message, _ = connection.receive()
            except (EOFError, OSError) as error:
                self._lose(rank, str(error))
                return
            if "failed" in message:
                if not self._is_breaking_off:
                    self._lose(rank, message["failed"])
                return
            with self._changed:
                answers = self._answers.setdefault(message["number"], {})
                answers[rank] = message["values"]
                self._changed.notify_all()

    def _lose(self, rank: int, why: str) -> None:
        address = self._connections[rank][1]
        reason = f"The process with node_rank={rank} ({address}) has ended: {why}."
        if self._close(reason):
            self._on_loss(reason)


def _listening(hosts: HostsConfig) -> socket.socket:
    """Listen at the leader's address; retry, as a cluster may publish its name late."""
    host, port = hosts.master_addr, hosts.plans_port
    listener, deadline = None, time.monotonic() + hosts.timeout_s
    try:
        addresses = _retry(
            lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM),
            socket.gaierror,
            deadline,
        )
        family, kind, protocol, _, address = addresses[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(hosts.nnodes)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"The leader cannot listen on {host}:{port}: {error}. master_addr must be "
            "an address of process 0's host, and master_port and the one after it "
            "free.",
            parameter="master_addr",
            value=host,
        ) from error
    return listener


class _Arrival:
    """A new connection; a thread waits for its signed hello, which may never come."""

    def __init__(self, stream: socket.socket, address: str, secret: bytes):
        self.address, self._stream = address, stream
        # None until the hello has arrived.
        self.connection: Connection | None = None
        self.hello: dict[str, Any] = {}
        self._thread = threading.Thread(
            target=self._receive, args=(secret,), name="jaxspec-hosts", daemon=True
        )
        self._thread.start()

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def _receive(self, secret: bytes) -> None:
        deadline = time.monotonic() + HELLO_S
        try:
            _set_options(self._stream)
            connection = Connection(
                self._stream, secret, is_leader=True, deadline=deadline
            )
            self.hello, _ = connection.receive()
            connection.set_timeout(None)
        except (EOFError, OSError) as error:
            _log.warning("Refused a connection from %s: %s", self.address, error)
            self._stream.close()
            return
        self.connection = connection

    def close(self, reason: str) -> None:
        """Close the connection; send the reason if the other side has the secret."""
        with suppress(OSError):  # it may have gone
            if self.connection is None:
                self._stream.shutdown(socket.SHUT_RDWR)  # ends the thread
        self._thread.join()
        if self.connection is not None:
            self.connection.refuse(reason)
        self._stream.close()


def _accept_all(
    listener: socket.socket,
    hosts: HostsConfig,
    secret: bytes,
    facts: Mapping[str, str],
    connected: dict[int, tuple[Connection, str]],
) -> None:
    """Fill `connected` with one connection for every rank."""
    deadline = time.monotonic() + hosts.timeout_s
    arrivals: list[_Arrival] = []
    reason = f"All {hosts.nnodes} processes have connected, or the leader was stopped."
    listener.settimeout(POLL_S)
    try:
        while len(connected) < hosts.nnodes - 1:
            if time.monotonic() > deadline:
                missing = [
                    rank for rank in range(1, hosts.nnodes) if rank not in connected
                ]
                raise ConfigError(
                    f"After {hosts.timeout_s} s no process has connected to "
                    f"{hosts.master_addr}:{hosts.plans_port} with node_rank "
                    f"{', '.join(map(str, missing))}: check that those processes run "
                    "and reach that address, or raise distributed_timeout_seconds.",
                    parameter="nnodes",
                    value=hosts.nnodes,
                )
            if len(arrivals) < hosts.nnodes + MAX_STRANGERS:
                with suppress(TimeoutError):
                    stream, peer = listener.accept()
                    address = f"{peer[0]}:{peer[1]}"
                    arrivals.append(_Arrival(stream, address, secret))
            else:
                time.sleep(POLL_S)
            for arrival in [arrival for arrival in arrivals if arrival.is_done()]:
                arrivals.remove(arrival)
                _accept(arrival, hosts, facts, connected)
    except ConfigError as error:
        reason = str(error)
        raise
    finally:
        for arrival in arrivals:
            arrival.close(reason)


def _accept(
    arrival: _Arrival,
    hosts: HostsConfig,
    facts: Mapping[str, str],
    connected: dict[int, tuple[Connection, str]],
) -> None:
    """Add a process to `connected` if it has the secret.

    Raises:
        ConfigError: It has the secret, and cannot take part.
    """
    connection, address, hello = arrival.connection, arrival.address, arrival.hello
    if connection is None:
        return
    rank = hello["node_rank"]
    _drop_gone(connected)
    if rank in connected:
        error = ConfigError(
            f"Two processes have node_rank={rank}: {connected[rank][1]} and "
            f"{address}. Each needs a different one, from 1 to {hosts.nnodes - 1}.",
            parameter="node_rank",
            value=rank,
        )
        connection.refuse(str(error))
        raise error
    # Added before the check: if it fails, all processes in `connected` get the reason.
    connected[rank] = connection, address
    differs = difference(facts, hello["facts"])
    if differs is not None:
        raise ConfigError(
            f"The process with node_rank={rank} ({address}) differs from the leader "
            f"in {differs}. All processes must be started with the same arguments, "
            "versions and weights.",
            parameter=differs.partition(":")[0],
        )


def _drop_gone(connected: dict[int, tuple[Connection, str]]) -> None:
    """Remove processes that have ended meanwhile, so that they may be started again."""
    gone = [rank for rank, (connection, _) in connected.items() if connection.is_gone()]
    for rank in gone:
        connection, address = connected.pop(rank)
        _log.warning("node_rank=%d (%s) has disconnected", rank, address)
        connection.close()


def _confirm_all(connected: Mapping[int, tuple[Connection, str]]) -> None:
    """Confirm to all processes that they take part.

    Raises:
        ConfigError: One has ended.
    """
    for rank, (connection, address) in connected.items():
        try:
            connection.send({"accepted": True})
        except OSError as error:
            raise ConfigError(
                f"The process with node_rank={rank} ({address}) ended before all "
                f"processes had connected: {error}. See its log, then restart all "
                "processes.",
                parameter="nnodes",
                value=len(connected) + 1,
            ) from error


class Leader:
    """A follower's side: receives the leader's commands in order."""

    def __init__(
        self, connection: Connection, on_loss: Callable[[str], None] = end_process
    ):
        """Start to receive commands.

        Args:
            on_loss: Called in a thread, with the reason, if the leader ends early.
        """
        self._connection, self._on_loss = connection, on_loss
        self._sending = threading.Lock()
        self._is_closed = False
        self._commands: queue.SimpleQueue[Command | str] = queue.SimpleQueue()
        # A separate thread, because the one that runs commands may be blocked in a
        # collective when the leader ends.
        threading.Thread(target=self._listen, name="jaxspec-hosts", daemon=True).start()

    @classmethod
    def find(
        cls,
        hosts: HostsConfig,
        facts: Mapping[str, str],
        on_loss: Callable[[str], None] = end_process,
    ) -> "Leader":
        """Connect to the leader, and wait until it has accepted all processes.

        Raises:
            ConfigError: The leader cannot be reached, or refuses this process.
        """
        secret, where = hosts.read_secret(), f"{hosts.master_addr}:{hosts.plans_port}"
        deadline = time.monotonic() + hosts.timeout_s
        stream = _reach(hosts, where, deadline)
        try:
            _set_options(stream)
            # The leader may be busy, and accepts one connection after the other.
            deadline = max(deadline, time.monotonic() + HELLO_S)
            connection = Connection(stream, secret, is_leader=False, deadline=deadline)
            connection.send({"node_rank": hosts.node_rank, "facts": dict(facts)})
            # Other followers may be late: the leader answers only when all have come,
            # or its time is over.
            connection.set_timeout(hosts.timeout_s + HELLO_S)
            answer, _ = connection.receive()
        except TimeoutError as error:
            stream.close()
            raise ConfigError(
                f"After {hosts.timeout_s} s the process that listens on {where} has "
                "not responded. Check that its node_rank is 0, and see its log.",
                parameter="master_addr",
                value=hosts.master_addr,
            ) from error
        except (EOFError, OSError) as error:
            stream.close()
            raise ConfigError(
                f"The leader at {where} did not accept node_rank={hosts.node_rank}: "
                f"{error}. hosts_secret_file must have the same content on all hosts; "
                "see the leader's log.",
                parameter="hosts_secret_file",
                value=hosts.secret_file,
            ) from error
        if "refused" in answer:
            connection.close()
            raise ConfigError(answer["refused"], parameter="node_rank")
        connection.set_timeout(None)
        return cls(connection, on_loss)

    def receive(self) -> Command:
        """Wait for the next command.

        Raises:
            EOFError: The leader has ended, and `on_loss` did not end this process.
        """
        command = self._commands.get()
        if isinstance(command, str):
            self._commands.put(command)
            raise EOFError(command)
        return command

    def _listen(self) -> None:
        """Queue commands until the last one."""
        while True:
            try:
                message, vector = self._connection.receive()
                if "refused" in message:  # another follower has ended meanwhile
                    raise EOFError(message["refused"])
            except (EOFError, OSError) as error:
                reason = f"The leader has ended: {error}."
                if not self._is_closed:
                    self._on_loss(reason)
                self._commands.put(reason)
                return
            number, name = message["number"], message["name"]
            self._commands.put(Command(number, name, message["values"], vector))
            if name == END:
                return

    def answer(self, command: Command, values: Mapping[str, Any]) -> None:
        """Report to the leader that a command is done."""
        self._send({"number": command.number, "values": values})

    def fail(self, reason: str) -> None:
        """Report to the leader why this process ends."""
        self._send({"failed": reason})

    def _send(self, content: Mapping[str, Any]) -> None:
        # If the leader has gone, `receive` reports it.
        with self._sending, suppress(OSError):
            self._connection.send(content)

    def close(self) -> None:
        """Close the connection."""
        self._is_closed = True
        self._connection.close()


def _reach(hosts: HostsConfig, where: str, deadline: float) -> socket.socket:
    """Connect to the leader as soon as it listens."""

    def connect() -> socket.socket:
        left = max(deadline - time.monotonic(), 0.001)
        return socket.create_connection((hosts.master_addr, hosts.plans_port), left)

    try:
        return _retry(connect, OSError, deadline)
    except OSError as error:
        raise ConfigError(
            f"After {hosts.timeout_s} s no process listens on {where}: {error}. "
            "master_addr and master_port must be those of the process with "
            "node_rank=0, and it must run.",
            parameter="master_addr",
            value=hosts.master_addr,
        ) from error
