"""Owns the responses that are kept, for whoever asks for one later or goes on from it.

They lie in sqlite: in memory, or in a file that outlives the server.
"""

import asyncio
import json
import logging
import sqlite3
import weakref
from collections.abc import Coroutine
from typing import Any, NamedTuple

from jaxspec.errors import ConfigError, wrong_argument
from jaxspec.serve.streaming import EventLog

_log = logging.getLogger(__name__)

IN_MEMORY = ":memory:"
# Statuses of what is still being made.
UNFINISHED = ("queued", "in_progress")
_TABLE = """
create table if not exists responses (
    number integer primary key, id blob unique not null,
    response text not null, messages text not null
)
"""
_NEWER = "alter table responses add column events text not null default ''"
_SIZE = "length(cast(response as blob)) + length(cast(messages as blob))"
_SIZE += " + length(cast(events as blob))"

Message = dict[str, Any]


class ResponseNotFoundError(Exception):
    """A request is about an earlier answer that is not kept."""

    def __init__(self, response_id: str):
        super().__init__(f"Response with id '{response_id}' not found.")


class Stored(NamedTuple):
    """A response, and the conversation that whoever goes on from it continues."""

    response: dict[str, Any]
    messages: list[Message]


class ResponseStore:
    """Keeps the newest responses, as many as go into a number of bytes.

    All calls come from the server's event loop: one takes some tens of microseconds.
    """

    def __init__(self, path: str | None, max_bytes: int):
        """Open a file, which may hold the responses of a server before; or memory.

        Raises:
            ConfigError: The file cannot be opened, or is no such store.
        """
        self._connection = connect(path)
        weakref.finalize(self, self._connection.close)
        self._max_bytes = max_bytes
        (found,) = self._execute(f"select coalesce(sum({_SIZE}), 0) from responses")
        (self._num_bytes,) = found
        self._end_unfinished()

    @property
    def is_on(self) -> bool:
        """Whether any response is kept."""
        return self._max_bytes > 0

    def put(self, stored: Stored) -> None:
        """Keep a response, in place of the one of the same id; the oldest may go.

        A full disk is logged, and does not fail the request.
        """
        try:
            self._put(stored)
        except sqlite3.Error:
            _log.exception("A response could not be kept")

    def _put(self, stored: Stored) -> None:
        key = _key(stored.response["id"])
        self._remove("id", key)
        texts = json.dumps(stored.response), json.dumps(stored.messages)
        self._execute(
            "insert into responses (id, response, messages) values (?, ?, ?)",
            key,
            *texts,
        )
        # `json.dumps` writes ASCII: as many bytes as characters.
        self._num_bytes += sum(map(len, texts))
        self._make_room()

    def _make_room(self) -> None:
        while self._num_bytes > self._max_bytes:
            ((oldest,),) = self._execute("select min(number) from responses")
            self._remove("number", oldest)

    def put_events(self, response_id: str, events: list[Any]) -> None:
        """Keep what was streamed of a response, if that is kept.

        `put` forgets it: the response of that id is then another.
        """
        text = json.dumps(events)
        change = "update responses set events = ? where id = ? and events = '' "
        change += "returning number"
        try:
            if self._execute(change, text, _key(response_id)):
                self._num_bytes += len(text)
                self._make_room()
        except sqlite3.Error:
            _log.exception("The events of a response could not be kept")

    def events(self, response_id: str) -> list[Any]:
        """Find what was streamed of a response; nothing of one that was not.

        Raises:
            ResponseNotFoundError: It was never kept, or is not any more.
        """
        wanted = "select events from responses where id = ?"
        found = self._execute(wanted, _key(response_id))
        if not found:
            raise ResponseNotFoundError(response_id)
        ((text,),) = found
        return json.loads(text) if text else []

    def get(self, response_id: str) -> Stored:
        """Find a response.

        Raises:
            ResponseNotFoundError: It was never kept, or is not any more.
        """
        found = self._execute(
            "select response, messages from responses where id = ?", _key(response_id)
        )
        if not found:
            raise ResponseNotFoundError(response_id)
        return Stored(*map(json.loads, found[0]))

    def delete(self, response_id: str) -> None:
        """Forget a response.

        Raises:
            ResponseNotFoundError: It was never kept, or is not any more.
        """
        if not self._remove("id", _key(response_id)):
            raise ResponseNotFoundError(response_id)

    def _remove(self, column: str, value: object) -> bool:
        found = self._execute(
            f"delete from responses where {column} = ? returning {_SIZE}", value
        )
        self._num_bytes -= sum(size for (size,) in found)
        return bool(found)

    def _end_unfinished(self) -> None:
        """Mark responses as failed that an earlier server was still making."""
        found = self._execute("select response, messages from responses")
        for response, messages in (map(json.loads, texts) for texts in found):
            if response["status"] in UNFINISHED:
                message = "The server ended before the response was made."
                error = {"code": "server_error", "message": message}
                response |= {"status": "failed", "error": error}
                self.put(Stored(response, messages))

    def _execute(self, statement: str, *values: object) -> list[Any]:
        return self._connection.execute(statement, values).fetchall()


def _key(response_id: str) -> bytes:
    """An id as it lies in the table: a client may choose what is no text to sqlite."""
    return response_id.encode("utf-8", "surrogatepass")


def connect(path: str | None) -> sqlite3.Connection:
    """Open a store's file and make its table; without a path, memory.

    Raises:
        ConfigError: It cannot be opened, or holds something else.
    """
    connection = None
    try:
        # Each statement is a transaction of its own.
        connection = sqlite3.connect(
            path or IN_MEMORY, isolation_level=None, check_same_thread=False
        )
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = normal")
        connection.execute(_TABLE)
        connection.execute("select id, response, messages from responses limit 1")
        columns = connection.execute("pragma table_info(responses)").fetchall()
        if "events" not in {name for _, name, *_ in columns}:
            connection.execute(_NEWER)
    except sqlite3.Error as error:
        if connection is not None:
            connection.close()
        allowed = "a file that can be written, in a folder that exists"
        hint = f"sqlite says: {error}."
        raise wrong_argument(
            ConfigError, "response_store", allowed, path, hint
        ) from error
    return connection


class Background:
    """Responses that are made in the background, with no connection open."""

    def __init__(self):
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._logs: dict[str, EventLog] = {}

    async def start(
        self,
        response_id: str,
        work: Coroutine[Any, Any, None],
        log: EventLog | None = None,
    ) -> None:
        """Begin one, which keeps its own result; return once it has begun.

        Args:
            log: Where it notes its events, for whoever wants to follow them.
        """
        task = self._tasks[response_id] = asyncio.create_task(work)
        if log is not None:
            self._logs[response_id] = log

        def forget(_: object) -> None:
            if self._tasks.get(response_id) is task:
                del self._tasks[response_id]
                self._logs.pop(response_id, None)

        task.add_done_callback(forget)
        # What is cancelled before it has begun could not keep that it was.
        await asyncio.sleep(0)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._tasks

    def log(self, response_id: str) -> EventLog | None:
        """The events of one that is being made, if it notes any."""
        return self._logs.get(response_id)

    async def wait(self, timeout_s: float) -> bool:
        """Wait for those that are being made; whether there is none any more."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=timeout_s)
        return not self._tasks

    async def cancel(self, response_id: str) -> None:
        """End one that is being made; any other is left as it is."""
        task = self._tasks.get(response_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
