"""The channel from the process that has the engine to those that do the same.

Owns who takes part, and one ordered stream of commands: which programs are compiled
and launched, with which plans. Knows nothing of jax. Placement and restarts are
others' business, Kubernetes' or the user's: when one process ends, all of them do.

What travels is JSON and vectors of int32, never pickles, and each message is signed
with a key that both sides make from the secret they share and from numbers that each
has drawn: nobody else can add, change, repeat or leave out one. It is not encrypted.
"""

import dataclasses
import hashlib
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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec.config.engine import EngineConfig
from jaxspec.config.hosts import HostsConfig
from jaxspec.errors import ConfigError, EngineDeadError
from jaxspec.program.plan import Features, StepShape
from jaxspec.program.tree.tree import Tree
from jaxspec_checkpoints.gguf.file import shards
from jaxspec_checkpoints.gguf.reading import find_gguf

_log = logging.getLogger(__name__)

# A process that ends is noticed at once: its connection is closed. One whose host is
# silent for three of these is taken for dead: by jax.distributed once all have joined
# (`join` in runner.py), before that by TCP's keepalive.
HEARTBEAT_S = 10
# How a process ends when another one has. A follower whose leader has gone may be ended
# by jax.distributed first, with SIGABRT: jax has no setting for that.
HOST_LOST = 1
# A collective may fail before the connection to the lost process is closed: so long is
# waited for that before the others are let go for what has failed here.
NOTICE_S = 1.0
# For whoever has connected to say who it is: all of it, and signed.
HELLO_S = 10
# For the others to close their connections after an orderly end, once jax's own end of
# all processes, which takes 3 * HEARTBEAT_S at most, is over.
END_S = 4 * HEARTBEAT_S
# Between two attempts to reach a leader that does not listen yet.
RETRY_S = 0.25
# How often the leader looks whether one that has connected has said who it is.
POLL_S = 0.05
# Connections beyond the ones it waits for that it hears at once.
MAX_STRANGERS = 64
# The last command.
END = "end"
MAGIC = b"jaxspec hosts 1\n"
NUMBER_BYTES = TAG_BYTES = 32
# A message: its number, the bytes of its JSON and of its vector, those, its signature.
_HEADER = struct.Struct("!QII")
# Far above any plan, far below what would fill a memory.
MAX_MESSAGE_BYTES = 2**28
# Of the first message, whose length is believed before its signature is checked.
MAX_FIRST_BYTES = 2**20
_VECTOR = np.dtype("<i4")
# Of a configuration what may be another on each host: paths, and what only the
# leader does.
LOCAL_FIELDS = ("model", "tokenizer", "served_model_name", "chat_template")
LOCAL_FIELDS += ("compilation_cache_dir", "disable_log_stats", "generation_defaults")
LOCAL_FIELDS += ("structured_outputs", "speculative.model", "hosts.node_rank")
LOCAL_FIELDS += ("hosts.master_addr", "hosts.headless", "hosts.secret_file")
LOCAL_FIELDS += ("hosts.timeout_s",)
# Fields that users give by another name.
_ARGUMENTS = {"page_size": "block_size", "num_pages": "num_gpu_blocks_override"}
_MAX_FACT = 120
# What is compared of a file of weights besides its header: places, and bytes at each.
NUM_SAMPLES, SAMPLE_BYTES = 32, 2**16
# The limit of safetensors itself.
MAX_SAFETENSORS_HEADER_BYTES = 100 * 10**6


class HostsError(Exception):
    """A message that nobody who knows the secret has sent, or no whole one."""


class Command(NamedTuple):
    """What the leader does next, and those that follow with it."""

    number: int
    name: str
    values: dict[str, Any]
    vector: np.ndarray | None


class Connection:
    """Signed messages over a socket, each with the number after the one before."""

    def __init__(
        self,
        stream: socket.socket,
        *,
        sends: bytes,
        receives: bytes,
        deadline: float | None = None,
    ):
        """Take over a connected socket.

        Args:
            sends, receives: The keys of both directions.
            deadline: Until when `receive` waits, as `set_timeout` would say it.
        """
        self._stream, self._deadline = stream, deadline
        self._sends, self._receives = sends, receives
        self._num_sent = self._num_received = 0

    def send(self, content: bytes, vector: bytes = b"") -> None:
        """Write one message.

        Raises:
            OSError: Nobody is there any more.
        """
        header = _HEADER.pack(self._num_sent, len(content), len(vector))
        self._num_sent += 1
        body = header + content + vector
        self._stream.sendall(body + _sign(self._sends, body))

    def receive(self) -> tuple[dict[str, Any], np.ndarray | None]:
        """Read one message.

        Raises:
            EOFError: The other side has closed the connection.
            HostsError: It was not signed with the secret, or is not the next one.
            OSError: The connection is broken, or it took too long.
        """
        header = self._read(_HEADER.size)
        number, num_content, num_vector = _HEADER.unpack(header)
        most = MAX_MESSAGE_BYTES if self._num_received else MAX_FIRST_BYTES
        if num_content + num_vector > most:
            raise HostsError("its message is too long")
        body = header + self._read(num_content + num_vector)
        tag = self._read(TAG_BYTES)
        if not hmac.compare_digest(tag, _sign(self._receives, body)):
            raise HostsError("its message is not signed with the same secret")
        if number != self._num_received:
            raise HostsError(f"message {number} came for {self._num_received}")
        self._num_received += 1
        end = _HEADER.size + num_content
        vector = None
        if num_vector:
            vector = np.frombuffer(body, _VECTOR, offset=end).astype(np.int32)
        return json.loads(body[_HEADER.size : end]), vector

    def is_gone(self) -> bool:
        """Whether the other side has closed it; only where none waits for a message."""
        try:
            flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
            return not self._stream.recv(1, flags)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def finish(self) -> None:
        """Send no more; what the other side sends is still received."""
        with suppress(OSError):  # the other side may have been first
            self._stream.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close it, also for a thread that reads."""
        with suppress(OSError):  # the other side may have been first
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()

    def set_timeout(self, seconds: float | int | None) -> None:
        """Have `receive` wait so long from now on; None for as long as it takes."""
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._stream.settimeout(seconds)

    def _read(self, count: int) -> bytes:
        return _read(self._stream, count, self._deadline)


def _read(stream: socket.socket, count: int, deadline: float | None) -> bytes:
    parts, left = [], count
    while left:
        if deadline is not None:
            # A socket's own timeout begins anew with every byte.
            stream.settimeout(max(deadline - time.monotonic(), 0.001))
        part = stream.recv(min(left, 2**20))
        if not part:
            raise EOFError("the connection was closed")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _set_options(stream: socket.socket) -> None:
    """Send at once, and notice when the other host is silent."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Systems without these take hours.
    for name, value in (
        ("TCP_KEEPIDLE", HEARTBEAT_S),
        ("TCP_KEEPINTVL", HEARTBEAT_S),
        ("TCP_KEEPCNT", 2),
    ):
        if hasattr(socket, name):
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _sign(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")


def connect(
    stream: socket.socket,
    secret: bytes,
    *,
    is_leader: bool,
    deadline: float | None = None,
) -> Connection:
    """Draw a number, read the other side's, and make keys of both.

    Args:
        deadline: Until when to wait for that, and for messages; see `set_timeout`.

    Raises:
        HostsError: The other side speaks something else.
        EOFError, OSError: It has gone, or says nothing.
    """
    own = secrets.token_bytes(NUMBER_BYTES)
    stream.sendall(MAGIC + own)
    told = _read(stream, len(MAGIC) + NUMBER_BYTES, deadline)
    if not told.startswith(MAGIC):
        raise HostsError("it is no jaxspec of this version")
    other = told[len(MAGIC) :]
    numbers = own + other if is_leader else other + own
    down = _sign(secret, b"from the leader" + numbers)
    up = _sign(secret, b"to the leader" + numbers)
    sends, receives = (down, up) if is_leader else (up, down)
    return Connection(stream, sends=sends, receives=receives, deadline=deadline)


def facts_of(config: EngineConfig, others: Mapping[str, object]) -> dict[str, str]:
    """What must be the same in all processes, by name.

    Args:
        others: What is no part of the configuration: versions, sources.
    """
    found = dict(_flat("", config))
    for name in LOCAL_FIELDS:
        found.pop(name, None)
    models = {"weights of the target": config.model}
    if config.speculative is not None and config.speculative.model is not None:
        models["weights of the draft"] = config.speculative.model
    for name, folder in models.items():
        files = _weight_files(Path(folder))
        found[name] = [(one.name, one.stat().st_size, _digest(one)) for one in files]
    return {name: _fact(value) for name, value in {**found, **others}.items()}


def _weight_files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    gguf = None if found else find_gguf(folder)
    return found if gguf is None else shards(gguf)


def _digest(path: Path) -> str:
    """Tell weights apart that have the same names and shapes, such as two fine-tunes.

    Reads 2 MiB of a file, however long it is: all of it may be tens of GiB on a network
    disk. A difference in few bytes elsewhere is not seen.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest = hashlib.sha256(struct.pack("!Q", size))

        def add(start: int, count: int) -> None:
            file.seek(start)
            digest.update(file.read(count))

        # safetensors: the length of the JSON header, and that.
        file.seek(0)
        start = file.read(8)
        if not start.startswith(b"GGUF"):
            num_header = int.from_bytes(start, "little")
            add(0, 8 + min(num_header, MAX_SAFETENSORS_HEADER_BYTES))
        for index in range(NUM_SAMPLES):
            add(size * index // NUM_SAMPLES, SAMPLE_BYTES)
        add(max(size - SAMPLE_BYTES, 0), SAMPLE_BYTES)
    return digest.hexdigest()[:16]


def _flat(prefix: str, record: Any) -> list[tuple[str, object]]:
    """The fields of a record, and of records in it, by dotted names."""
    found: list[tuple[str, object]] = []
    for one in dataclasses.fields(record):
        name, value = prefix + one.name, getattr(record, one.name)
        if dataclasses.is_dataclass(value) and name not in LOCAL_FIELDS:
            found += _flat(f"{name}.", value)
        else:
            found.append((name, value))
    return found


def _fact(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    if len(text) <= _MAX_FACT:
        return text
    return f"{text[:_MAX_FACT]}... ({hashlib.sha256(text.encode()).hexdigest()[:16]})"


def difference(leader: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The first by name that two processes do not have in common, in words, or None."""
    for name in sorted({*leader, *other}):
        if leader.get(name) != other.get(name):
            theirs, ours = other.get(name, "not set"), leader.get(name, "not set")
            called = name.removeprefix("given.")
            called = _ARGUMENTS.get(called, called)
            return f"{called}: {theirs} there, and {ours} at the leader"
    return None


def shape_values(shape: StepShape) -> dict[str, Any]:
    """A shape as JSON; `shape_of` reads it."""
    return dataclasses.asdict(shape)


def shape_of(values: Mapping[str, Any]) -> StepShape:
    """The shape that `shape_values` has written."""
    features, template = Features(**values["features"]), values["template"]
    if template is not None:
        template = Tree(parents=tuple(template["parents"]))
    return StepShape(**{**values, "features": features, "template": template})


def end_process(reason: str) -> None:
    """End this process: a launch of it waits for one that will not come.

    XLA has no way to give that up, so there is nothing left to be closed in order.
    """
    _log.critical("%s This process ends too: start all of them again.", reason)
    logging.shutdown()
    os._exit(HOST_LOST)


class Followers:
    """The leader's side: the processes that do what it does.

    Every command is sent before the leader does the same, so that none waits for it in
    a collective that the others never hear of. Any thread may send.
    """

    def __init__(
        self,
        connections: Mapping[int, tuple[Connection, str]],
        on_loss: Callable[[str], None] = end_process,
    ):
        """Take the connections, and the addresses, of all ranks.

        Args:
            on_loss: Called, in a thread, with what has happened to a process.
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
        """Wait for all processes, and see that they are alike.

        Raises:
            ConfigError: One is missing, is there twice, differs or has ended; or the
                address cannot be listened on. All that have come are told so.
        """
        secret = hosts.read_secret()
        found: dict[int, tuple[Connection, str]] = {}
        with _listening(hosts) as listener:
            try:
                _accept_all(listener, hosts, secret, facts, found)
                _confirm_all(found)
            except ConfigError as error:
                for connection, _ in found.values():
                    _refuse(connection, str(error))
                raise
        _log.info("All %d processes are there", hosts.nnodes)
        return cls(found, on_loss)

    def send(
        self, name: str, values: Mapping[str, Any], vector: np.ndarray | None = None
    ) -> int:
        """Have all do something; returns the number of the command.

        Raises:
            EngineDeadError: A process has ended.
        """
        data = b"" if vector is None else vector.astype(_VECTOR).tobytes()
        with self._sending:
            if self._ended is not None:
                raise EngineDeadError(self._ended)
            self._number += 1
            content = {"number": self._number, "name": name, "values": values}
            text = _json(content)
            for rank, (connection, _) in self._connections.items():
                try:
                    connection.send(text, data)
                except OSError as error:
                    self._lose(rank, str(error))
                    raise EngineDeadError(self._ended or "") from error
            return self._number

    def wait(self, number: int) -> list[dict[str, Any]]:
        """Wait until all have done a command; returns what they answer, by rank.

        Nothing, once they have ended as they were told to.

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
        """Let all end as they would by themselves; nothing is sent any more.

        Their answers are read until they close: one that came to a closed socket would
        reset the connection, and the last command could be lost.
        """
        try:
            self.send(END, {})
        except EngineDeadError:
            return  # they have ended already
        self._is_over = True
        if not self._stop("The engine has ended, and those that followed it."):
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
        """Have all end at once: this process has not done what it told them to do.

        Args:
            may_be_loss: The reason may be that another process has gone. Up to
                `NOTICE_S` its connection is waited for: if it closes, that loss is
                told in place of `reason`. A failure that another process reports
                meanwhile is not taken for a loss.
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
        """Hear and say no more; False where that was so already."""
        if not self._stop(reason):
            return False
        for connection, _ in self._connections.values():
            connection.close()
        return True

    def _stop(self, reason: str) -> bool:
        """Say no more; False where that was so already."""
        with self._changed:
            if self._ended is not None:
                return False
            self._ended = reason
            self._changed.notify_all()
        return True

    def _listen(self, rank: int) -> None:
        """Take in what a process answers, until it goes."""
        connection = self._connections[rank][0]
        while True:
            try:
                message, _ = connection.receive()
            except (EOFError, OSError, HostsError) as error:
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
        reason = f"The process of node_rank={rank} ({address}) has ended: {why}."
        if self._close(reason):
            self._on_loss(reason)


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _listening(hosts: HostsConfig) -> socket.socket:
    where = f"{hosts.master_addr}:{hosts.plans_port}"
    listener, deadline = None, time.monotonic() + hosts.timeout_s
    try:
        found = _resolve(hosts, deadline)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(hosts.nnodes)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"The leader cannot listen on {where}: {error}. master_addr must be an "
            "address of process 0's host, and master_port and the one after it free.",
            parameter="master_addr",
            value=hosts.master_addr,
        ) from error
    return listener


def _resolve(hosts: HostsConfig, deadline: float) -> list[Any]:
    """Look the leader's name up: a cluster may give it after it has started the host.

    Raises:
        OSError: The name is unknown.
    """
    while True:
        try:
            return socket.getaddrinfo(
                hosts.master_addr, hosts.plans_port, type=socket.SOCK_STREAM
            )
        except socket.gaierror:
            if time.monotonic() + RETRY_S > deadline:
                raise
            time.sleep(RETRY_S)


class _Arrival:
    """One that has connected, and may never say who it is: a thread waits for that."""

    def __init__(self, stream: socket.socket, address: str, secret: bytes):
        self.address, self._stream = address, stream
        # None until it has said who it is with the secret.
        self.connection: Connection | None = None
        self.hello: dict[str, Any] = {}
        self._thread = threading.Thread(
            target=self._hear, args=(secret,), name="jaxspec-hosts", daemon=True
        )
        self._thread.start()

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def _hear(self, secret: bytes) -> None:
        deadline = time.monotonic() + HELLO_S
        try:
            _set_options(self._stream)
            connection = connect(
                self._stream, secret, is_leader=True, deadline=deadline
            )
            self.hello, _ = connection.receive()
            connection.set_timeout(None)
        except (EOFError, OSError, HostsError) as error:
            _log.warning(
                "%s wanted to take part, and was refused: %s", self.address, error
            )
            self._stream.close()
            return
        self.connection = connection

    def close(self, reason: str | None) -> None:
        """Send it away, with the reason if it knows the secret."""
        with suppress(OSError):  # it may have gone
            if self.connection is None:
                self._stream.shutdown(socket.SHUT_RDWR)  # ends the thread's reading
        self._thread.join()
        if self.connection is not None and reason is not None:
            _refuse(self.connection, reason)
        self._stream.close()


def _refuse(connection: Connection, reason: str) -> None:
    with suppress(OSError):  # it may have gone
        connection.send(_json({"refused": reason}))
    connection.close()


def _accept_all(
    listener: socket.socket,
    hosts: HostsConfig,
    secret: bytes,
    facts: Mapping[str, str],
    found: dict[int, tuple[Connection, str]],
) -> None:
    """Fill `found` with one connection of every rank."""
    deadline = time.monotonic() + hosts.timeout_s
    arrivals: list[_Arrival] = []
    reason = f"All {hosts.nnodes} processes are there, or the leader was stopped."
    listener.settimeout(POLL_S)
    try:
        while len(found) < hosts.nnodes - 1:
            if time.monotonic() > deadline:
                raise _missing(hosts, found)
            if len(arrivals) < hosts.nnodes + MAX_STRANGERS:
                with suppress(TimeoutError):
                    stream, peer = listener.accept()
                    address = f"{peer[0]}:{peer[1]}"
                    arrivals.append(_Arrival(stream, address, secret))
            else:
                time.sleep(POLL_S)
            for one in [one for one in arrivals if one.is_done()]:
                arrivals.remove(one)
                _accept(one, hosts, facts, found)
    except ConfigError as error:
        reason = str(error)
        raise
    finally:
        for one in arrivals:
            one.close(reason)


def _confirm_all(found: Mapping[int, tuple[Connection, str]]) -> None:
    """Tell all that they take part.

    Raises:
        ConfigError: One has gone.
    """
    for rank, (connection, address) in found.items():
        try:
            connection.send(_json({"accepted": True}))
        except OSError as error:
            raise ConfigError(
                f"The process of node_rank={rank} ({address}) has ended before all "
                f"were there: {error}. See its log, and start all of them again.",
                parameter="nnodes",
                value=len(found) + 1,
            ) from error


def _drop_gone(found: dict[int, tuple[Connection, str]]) -> None:
    """Forget who has ended while the others come: it may be started again."""
    gone = [rank for rank, (connection, _) in found.items() if connection.is_gone()]
    for rank in gone:
        connection, address = found.pop(rank)
        _log.warning("node_rank=%d (%s) has gone again", rank, address)
        connection.close()


def _missing(hosts: HostsConfig, found: Mapping[int, object]) -> ConfigError:
    missing = [one for one in range(1, hosts.nnodes) if one not in found]
    return ConfigError(
        f"After {hosts.timeout_s} s nobody has come to {hosts.master_addr}:"
        f"{hosts.plans_port} with node_rank {', '.join(map(str, missing))}: see that "
        "those processes run, and reach that address, or raise "
        "distributed_timeout_seconds.",
        parameter="nnodes",
        value=hosts.nnodes,
    )


def _accept(
    arrival: _Arrival,
    hosts: HostsConfig,
    facts: Mapping[str, str],
    found: dict[int, tuple[Connection, str]],
) -> None:
    """Take in one process; who does not know the secret is left outside.

    Raises:
        ConfigError: It knows the secret, and cannot take part.
    """
    connection, address, hello = arrival.connection, arrival.address, arrival.hello
    if connection is None:
        return
    rank = hello["node_rank"]
    _drop_gone(found)
    if rank in found:
        error = ConfigError(
            f"Two processes have node_rank={rank}: {found[rank][1]} and {address}. "
            f"Each needs its own, from 1 to {hosts.nnodes - 1}.",
            parameter="node_rank",
            value=rank,
        )
        _refuse(connection, str(error))
        raise error
    found[rank] = connection, address  # told as well, should it be refused
    differs = difference(facts, hello["facts"])
    if differs is not None:
        raise ConfigError(
            f"The process of node_rank={rank} ({address}) differs in {differs}. All "
            "must be started with the same arguments, versions and weights.",
            parameter=differs.partition(":")[0],
        )


class Leader:
    """A follower's side: commands from the leader, in order."""

    def __init__(
        self, connection: Connection, on_loss: Callable[[str], None] = end_process
    ):
        """Take the connection.

        Args:
            on_loss: Called, in a thread, when the leader has ended without a word.
        """
        self._connection, self._on_loss = connection, on_loss
        self._sending = threading.Lock()
        self._is_closed = False
        self._commands: queue.SimpleQueue[Command | str] = queue.SimpleQueue()
        # A separate thread, because the one that runs commands may be blocked in a
        # collective when the leader dies.
        threading.Thread(target=self._listen, name="jaxspec-hosts", daemon=True).start()

    @classmethod
    def find(
        cls,
        hosts: HostsConfig,
        facts: Mapping[str, str],
        on_loss: Callable[[str], None] = end_process,
    ) -> "Leader":
        """Reach the leader, and wait until it has seen that all are alike.

        Raises:
            ConfigError: There is no leader there, or it refuses this process.
        """
        secret, where = hosts.read_secret(), f"{hosts.master_addr}:{hosts.plans_port}"
        deadline = time.monotonic() + hosts.timeout_s
        stream = _reach(hosts, where, deadline)
        try:
            _set_options(stream)
            # The leader may be busy, and takes them in one by one.
            deadline = max(deadline, time.monotonic() + HELLO_S)
            connection = connect(stream, secret, is_leader=False, deadline=deadline)
            hello = {"node_rank": hosts.node_rank, "facts": dict(facts)}
            connection.send(_json(hello))
            # The others may come late; the leader says when it does not wait any more.
            connection.set_timeout(hosts.timeout_s + HELLO_S)
            answer, _ = connection.receive()
        except TimeoutError as error:
            stream.close()
            raise ConfigError(
                f"After {hosts.timeout_s} s what listens on {where} has not answered. "
                "See that the process with node_rank=0 runs there, and its log.",
                parameter="master_addr",
                value=hosts.master_addr,
            ) from error
        except (EOFError, OSError, HostsError) as error:
            stream.close()
            raise ConfigError(
                f"The leader at {where} does not take node_rank={hosts.node_rank}: "
                f"{error}. hosts_secret_file must have the same content on all hosts; "
                "the leader's log says more.",
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
        """Take in commands until the last one."""
        while True:
            try:
                message, vector = self._connection.receive()
                if "refused" in message:  # another one has ended meanwhile
                    raise EOFError(message["refused"])
            except (EOFError, OSError, HostsError) as error:
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
        """Say that a command has been done."""
        self._send({"number": command.number, "values": values})

    def fail(self, reason: str) -> None:
        """Say why this process ends."""
        self._send({"failed": reason})

    def _send(self, content: Mapping[str, Any]) -> None:
        # If the leader has gone, `receive` says so.
        with self._sending, suppress(OSError):
            self._connection.send(_json(content))

    def close(self) -> None:
        """End the connection."""
        self._is_closed = True
        self._connection.close()


def _reach(hosts: HostsConfig, where: str, deadline: float) -> socket.socket:
    """Connect to the leader as soon as it listens."""
    address = hosts.master_addr, hosts.plans_port
    while True:
        left = deadline - time.monotonic()
        try:
            return socket.create_connection(address, timeout=max(left, 0.001))
        except OSError as error:
            if time.monotonic() + RETRY_S < deadline:
                time.sleep(RETRY_S)
                continue
            raise ConfigError(
                f"After {hosts.timeout_s} s nobody listens on {where}: {error}. "
                "master_addr and master_port must be those of the process with "
                "node_rank=0, and it must run.",
                parameter="master_addr",
                value=hosts.master_addr,
            ) from error
