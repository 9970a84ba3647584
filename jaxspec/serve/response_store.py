"""Owns stored responses, which clients can retrieve or continue later.

They are rows of an SQLite table: in memory, or in a file that survives restarts and
that several servers may share.
"""

import asyncio
import json
import logging
import os
import sqlite3
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NamedTuple

from jaxspec.errors import ConfigError, wrong_argument
from jaxspec.serve.streaming import EventLog, write_in_parts

_log = logging.getLogger(__name__)

IN_MEMORY = ":memory:"
# This encoder writes ASCII, because SQLite cannot store lone surrogates in text
# columns.
_encode = json.JSONEncoder(separators=(",", ":")).encode
# Statuses of a response that is not finished.
UNFINISHED = ("queued", "in_progress")
# Seconds between the heartbeats of a server with unfinished responses.
HEARTBEAT_S = 2.0
# Seconds without a heartbeat after which the server of an unfinished response counts as
# ended.
MAX_SILENCE_S = 30.0
# Seconds to wait for the file's lock, which other servers hold for milliseconds per
# write.
LOCK_TIMEOUT_S = 5.0
_SIZE = " + ".join(
    f"length(cast({{row}}.{name} as blob))"
    for name in ("response", "messages", "events")
)
_NEW_SIZE, _OLD_SIZE = _SIZE.format(row="new"), _SIZE.format(row="old")
_ADD = "update response_totals set num_bytes = num_bytes"
# Triggers maintain the total number of bytes, so that it is correct if several servers
# share the file.
_SCHEMA = (
    """
    create table if not exists responses (
        number integer primary key, owner text not null, id blob not null,
        server text not null, is_unfinished integer not null, seen real not null,
        is_cancelled integer not null default 0,
        response text not null, messages text not null,
        events text not null default '', unique (owner, id)
    )
    """,
    "create index if not exists responses_by_age on responses (is_unfinished, number)",
    "create table if not exists response_totals (num_bytes integer not null)",
    "insert into response_totals select 0 where not exists "
    "(select 1 from response_totals)",
    "create trigger if not exists responses_added after insert on responses "
    f"begin {_ADD} + ({_NEW_SIZE}); end",
    "create trigger if not exists responses_removed after delete on responses "
    f"begin {_ADD} - ({_OLD_SIZE}); end",
    "create trigger if not exists responses_changed after update of response, "
    f"messages, events on responses begin {_ADD} + ({_NEW_SIZE}) - ({_OLD_SIZE}); end",
)
_COLUMNS = "owner, id, server, is_unfinished, seen, response, messages, events"

Message = dict[str, Any]
# The key of a stored response: its owner and its id.
Key = tuple[str, str]


class ResponseNotFoundError(Exception):
    """A request names an earlier response that is not stored."""

    def __init__(self, response_id: str):
        super().__init__(f"Response with id '{response_id}' not found.")


class Stored(NamedTuple):
    """A response, and the conversation that a later one continues."""

    response: dict[str, Any]
    messages: list[Message]


class ResponseStore:
    """Stores the newest responses, up to a total number of bytes.

    A response belongs to an owner, the API key of its request: other owners can neither
    find nor replace it. Several servers may share one file. A server changes only the
    responses that it has added itself.

    A call takes tens of microseconds. Calls with large responses take longer: make them
    outside the event loop's thread.
    """

    def __init__(self, path: str | None, max_bytes: int):
        """Open the store's file, which may hold responses; without a path, use memory.

        Raises:
            ConfigError: The file cannot be opened, or is not a response store.
        """
        self._connection = connect(path)
        weakref.finalize(self, self._connection.close)
        self._max_bytes = max_bytes
        self._lock = threading.RLock()  # of the connection
        self._server = uuid.uuid4().hex

    @property
    def is_on(self) -> bool:
        """Whether responses are stored."""
        return self._max_bytes > 0

    def add(self, stored: Stored, owner: str = "") -> bool:
        """Store a new response; may evict finished ones, the oldest first.

        A full disk is logged, and does not fail the request.

        Returns:
            False if the owner already has a response with that id, which is unchanged.
        """
        values = self._values(stored)
        change = f"insert into responses ({_COLUMNS}) values (?, ?, ?, ?, ?, ?, ?, '') "
        change += "on conflict do nothing returning number"
        key = owner, _as_bytes(stored.response["id"]), self._server
        added = self._write(change, *key, *values)
        return added is None or bool(added)

    def update(self, stored: Stored, owner: str = "") -> None:
        """Replace a response that this server has added, unless it was evicted."""
        change = "update responses set is_unfinished = ?, seen = ?, response = ?, "
        change += "messages = ?, events = '', "
        change += "number = (select max(number) + 1 from responses) "
        change += "where owner = ? and id = ? and server = ?"
        key = owner, _as_bytes(stored.response["id"]), self._server
        self._write(change, *self._values(stored), *key)

    def put_events(self, response_id: str, events: list[Any], owner: str = "") -> None:
        """Store the streamed events of a response that this server has added.

        A later `update` of the response deletes these events.
        """
        change = "update responses set events = ? "
        change += "where owner = ? and id = ? and server = ?"
        key = owner, _as_bytes(response_id), self._server
        self._write(change, write_in_parts(events, _encode), *key)

    def events(self, response_id: str, owner: str = "") -> list[Any]:
        """Return the stored events of a response; empty if it is not a stream.

        Raises:
            ResponseNotFoundError: It is not stored.
        """
        (text,) = self._find("events", response_id, owner)
        return json.loads(text) if text else []

    def get(self, response_id: str, owner: str = "") -> Stored:
        """Return a response.

        Its status is "failed" if its server ended before it was finished.

        Raises:
            ResponseNotFoundError: It is not stored.
        """
        wanted = "response, messages, is_unfinished, seen"
        *texts, is_unfinished, seen = self._find(wanted, response_id, owner)
        response, messages = map(json.loads, texts)
        if is_unfinished and time.time() - seen > MAX_SILENCE_S:
            message = "The server ended before the response was finished."
            error = {"code": "server_error", "message": message}
            response |= {"status": "failed", "error": error}
        return Stored(response, messages)

    def num_bytes(self, response_id: str, owner: str = "") -> int:
        """Return the stored size of a response, with its messages and events.

        Raises:
            ResponseNotFoundError: It is not stored.
        """
        size = _SIZE.format(row="responses")
        (num_bytes,) = self._find(size, response_id, owner)
        return num_bytes

    def has(self, response_id: str, owner: str = "") -> bool:
        """Return whether an owner has a response with that id."""
        try:
            self._find("number", response_id, owner)
        except ResponseNotFoundError:
            return False
        return True

    def delete(self, response_id: str, owner: str = "") -> None:
        """Delete a response; the server that generates it stops generating it.

        Raises:
            ResponseNotFoundError: It is not stored.
        """
        change = "delete from responses where owner = ? and id = ? returning number"
        if not self._execute(change, owner, _as_bytes(response_id)):
            raise ResponseNotFoundError(response_id)

    def cancel(self, response_id: str, owner: str = "") -> None:
        """Mark a response as cancelled.

        The server that generates it stops generating it at its next heartbeat.
        """
        change = "update responses set is_cancelled = 1 where owner = ? and id = ?"
        self._execute(change, owner, _as_bytes(response_id))

    def heartbeat(self, making: Iterable[Key]) -> list[Key]:
        """Record that this server is still generating its unfinished responses.

        Returns:
            Keys of the responses in `making` that were deleted, or cancelled by another
            server.

        Raises:
            sqlite3.Error: The file cannot be written.
        """
        change = "update responses set seen = ? where server = ? and is_unfinished"
        self._execute(change, time.time(), self._server)
        wanted = "select is_unfinished and is_cancelled from responses "
        wanted += "where owner = ? and id = ? and server = ?"
        unwanted: list[Key] = []
        for owner, response_id in making:
            key = owner, _as_bytes(response_id), self._server
            if self._execute(wanted, *key) != [(0,)]:
                unwanted.append((owner, response_id))
        return unwanted

    @staticmethod
    def _values(stored: Stored) -> tuple[object, ...]:
        is_unfinished = stored.response["status"] in UNFINISHED
        texts = (write_in_parts(one, _encode) for one in stored)
        return is_unfinished, time.time(), *texts

    def _write(self, change: str, *values: object) -> list[Any] | None:
        """Execute a statement and evict rows over the limit; None on error."""
        try:
            with self._lock, self._connection:  # commits, or rolls back
                self._execute("begin immediate")
                found = self._execute(change, *values)
                self._make_room()
        except sqlite3.Error:
            _log.exception("A response could not be stored")
            return None
        return found

    def _make_room(self) -> None:
        remove = "delete from responses where number = (select number from responses "
        remove += "order by is_unfinished, number limit 1) returning number"
        has_removed = True
        while has_removed:
            ((num_bytes,),) = self._execute("select num_bytes from response_totals")
            if num_bytes <= self._max_bytes:
                return
            has_removed = bool(self._execute(remove))

    def _find(self, wanted: str, response_id: str, owner: str) -> Any:
        found = self._execute(
            f"select {wanted} from responses where owner = ? and id = ?",
            owner,
            _as_bytes(response_id),
        )
        if not found:
            raise ResponseNotFoundError(response_id)
        return found[0]

    def _execute(self, statement: str, *values: object) -> list[Any]:
        with self._lock:
            return self._connection.execute(statement, values).fetchall()


def _as_bytes(response_id: str) -> bytes:
    """Return an id as stored: SQLite cannot store every client's id as text."""
    return response_id.encode("utf-8", "surrogatepass")


def connect(path: str | None) -> sqlite3.Connection:
    """Open a store's file and create its tables; without a path, use memory.

    Only the user of this process may read or write the file.

    Raises:
        ConfigError: The file cannot be opened, or is not a response store.
    """
    connection = None
    try:
        if path:
            _make_private(path)
        # Autocommit: each statement is a transaction of its own unless one is begun.
        connection = sqlite3.connect(
            path or IN_MEMORY,
            timeout=LOCK_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = normal")
        with connection:
            connection.execute("begin immediate")
            _make_tables(connection)
    except (sqlite3.Error, OSError) as error:
        if connection is not None:
            connection.close()
        allowed = "a file that can be written, in a folder that exists"
        hint = f"SQLite says: {error}."
        if isinstance(error, OSError):
            hint = f"{error.strerror}."
        raise wrong_argument(
            ConfigError, "response_store", allowed, path, hint
        ) from error
    return connection


def _make_private(path: str) -> None:
    """Make a file private to this user; SQLite gives its WAL files the same mode."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_mode & 0o077:
            os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


def _make_tables(connection: sqlite3.Connection) -> None:
    """Create the tables; migrate rows of the earlier schema, which had no owners."""
    found = connection.execute("pragma table_info(responses)").fetchall()
    names = {name for _, name, *_ in found}
    is_earlier = bool(names) and "owner" not in names
    if is_earlier:
        connection.execute("alter table responses rename to earlier_responses")
    for statement in _SCHEMA:
        connection.execute(statement)
    connection.execute(f"select {_COLUMNS} from responses limit 1")
    if is_earlier:
        events = "events" if "events" in names else "''"
        unfinished = "json_extract(response, '$.status') in ('queued', 'in_progress')"
        connection.execute(
            f"insert into responses ({_COLUMNS}) select '', id, '', {unfinished}, 0, "
            f"response, messages, {events} from earlier_responses order by number"
        )
        connection.execute("drop table earlier_responses")


class Background:
    """Background responses, which are generated without an open connection.

    Args:
        heartbeat: `ResponseStore.heartbeat`, called every `HEARTBEAT_S` with the
            running responses. Those that it returns are cancelled.
    """

    def __init__(self, heartbeat: Callable[[Iterable[Key]], list[Key]]):
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._logs: dict[Key, EventLog] = {}
        self._beat = heartbeat
        self._beating: asyncio.Task[None] | None = None

    async def start(
        self,
        key: Key,
        work: Coroutine[Any, Any, None],
        log: EventLog | None = None,
    ) -> None:
        """Start a response; return once its task runs.

        Args:
            work: Generates the response, and stores it.
            log: Receives the response's events, for clients that stream them.
        """
        task = self._tasks[key] = asyncio.create_task(work)
        if log is not None:
            self._logs[key] = log

        def forget(_: object) -> None:
            if self._tasks.get(key) is task:
                del self._tasks[key]
                self._logs.pop(key, None)

        task.add_done_callback(forget)
        if self._beating is None or self._beating.done():
            self._beating = asyncio.create_task(self._send_heartbeats())
        # A task cancelled before it has started could not store its cancellation.
        await asyncio.sleep(0)

    def __contains__(self, key: Key) -> bool:
        return key in self._tasks

    def log(self, key: Key) -> EventLog | None:
        """Return the event log of a running response, if it has one."""
        return self._logs.get(key)

    async def wait(self, timeout_s: float) -> bool:
        """Wait for running responses; return whether all have ended."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=timeout_s)
        return not self._tasks

    async def cancel(self, key: Key) -> None:
        """Cancel a response if it is running, and wait until it has ended."""
        task = self._tasks.get(key)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _send_heartbeats(self) -> None:
        while self._tasks:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                unwanted = self._beat(list(self._tasks))
            except sqlite3.Error:
                _log.exception(
                    "The heartbeat of unfinished responses cannot be written"
                )
                continue
            for key in unwanted:
                self._tasks[key].cancel()
