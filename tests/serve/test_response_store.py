"""The store of responses: its limits, persistence, and use by several servers."""

import asyncio
import json
import sqlite3
import subprocess
import sys
from typing import Any

import pytest

from jaxspec.errors import ConfigError
from jaxspec.serve import response_store
from jaxspec.serve.response_store import (
    UNFINISHED,
    Background,
    ResponseNotFoundError,
    ResponseStore,
    Stored,
)
from jaxspec.serve.settings import ServerSettings

MB = 2**20


def stored(response_id: str, text: str = "", status: str = "completed") -> Stored:
    response = {"id": response_id, "status": status, "text": text}
    return Stored(response, [{"role": "user", "content": text}])


def size_of(one: Any) -> int:
    return sum(len(json.dumps(part, separators=(",", ":"))) for part in one)


def kept(store: ResponseStore, *names: str) -> list[str]:
    """Return the names of the stored responses "resp_<name>"."""
    return [name for name in names if store.has(f"resp_{name}")]


@pytest.mark.parametrize("response_id", ["resp_1", "", "resp_\u00e9\x00", "\ud800"])
def test_responses_are_added_updated_and_deleted(response_id):
    store, first = ResponseStore(None, MB), stored(response_id, "\u00e9\x00\u2028")
    second = stored(response_id, "other")
    assert store.add(first)
    assert not store.add(second), "a response is not replaced"
    assert store.get(response_id) == first
    store.update(second)
    assert store.get(response_id) == second
    store.delete(response_id)
    for find in (store.get, store.delete):
        with pytest.raises(ResponseNotFoundError):
            find(response_id)
    store.update(second)  # the response was deleted
    assert not store.has(response_id)


def test_other_owners_find_nothing():
    store = ResponseStore(None, MB)
    assert store.add(stored("resp_1", "a"), "a")
    assert store.add(stored("resp_1", "b"), "b")
    store.put_events("resp_1", ["b"], "b")
    assert store.get("resp_1", "a") == stored("resp_1", "a")
    assert store.events("resp_1", "a") == []
    store.delete("resp_1", "a")
    assert store.get("resp_1", "b") == stored("resp_1", "b")
    for find in (store.get, store.events, store.delete):
        with pytest.raises(ResponseNotFoundError):
            find("resp_1", "a")


def test_evicts_oldest():
    names = [*"0123456789"]
    all_of_them = [stored(f"resp_{name}", "x" * 100) for name in names]
    most = 4 * size_of(all_of_them[0])
    store = ResponseStore(None, most)
    for one in all_of_them:
        store.add(one)
    assert kept(store, *names) == [*"6789"]
    # An updated response becomes the newest.
    store.update(all_of_them[6])
    store.add(stored("resp_a", "x" * 100))
    assert kept(store, *names, "a") == [*"689a"]
    # Deleting a response frees space.
    store.delete("resp_8")
    store.add(stored("resp_b", "x" * 100))
    assert kept(store, *names, "a", "b") == [*"69ab"]
    store.add(stored("resp_c", "x" * most))
    assert not kept(store, "9", "b", "c")


def test_file_survives_restart(tmp_path, monkeypatch):
    path = str(tmp_path / "responses.db")
    store = ResponseStore(path, MB)
    for number in range(3):
        store.add(stored(f"resp_{number}", "\u00e9" * 50))
    store.add(stored("resp_3", status="in_progress"))
    store.add(stored("resp_4", status="queued"))
    del store
    later = ResponseStore(path, MB)
    assert later.get("resp_1") == stored("resp_1", "\u00e9" * 50)
    for response_id in ("resp_3", "resp_4"):
        assert later.get(response_id).response["status"] in UNFINISHED
    monkeypatch.setattr(response_store, "MAX_SILENCE_S", -1.0)
    for response_id in ("resp_3", "resp_4"):
        response = later.get(response_id).response
        assert response["status"] == "failed"
        assert response["error"]["message"].startswith("The server ended")
    # Responses from before the restart count; finished ones are evicted first.
    smaller = ResponseStore(path, 2 * size_of(stored("resp_0", "\u00e9" * 50)) + 400)
    smaller.add(stored("resp_5"))
    assert kept(smaller, "0", "3", "4", "5") == ["3", "4", "5"]


def test_file_is_private(tmp_path):
    path = tmp_path / "responses.db"
    path.touch(0o644)
    store = ResponseStore(str(path), MB)
    store.add(stored("resp_1"))
    modes = {one.name: one.stat().st_mode & 0o777 for one in tmp_path.iterdir()}
    assert set(modes.values()) == {0o600}, modes
    assert len(modes) > 1  # the WAL files are private too


OTHER_SERVER = """
import sys
from jaxspec.serve.response_store import ResponseStore, Stored
store = ResponseStore(sys.argv[1], int(sys.argv[2]))
store.add(Stored({"id": "resp_made", "status": "in_progress"}, []))
print("ready", flush=True)
for line in sys.stdin:
    if line == "heartbeat\\n":
        print(store.heartbeat([("", "resp_made")]), flush=True)
        continue
    for number in range(300):
        text = "x" * 100
        one = Stored({"id": f"resp_{sys.argv[3]}_{number}", "status": "completed"}, [])
        one.response["text"] = text
        assert store.add(one)
        assert store.has(one.response["id"])
    print("done", flush=True)
"""


def test_two_servers_share_a_file(tmp_path, monkeypatch):
    path, most = str(tmp_path / "responses.db"), 400 * 165
    command = [sys.executable, "-c", OTHER_SERVER, path, str(most), "theirs"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    other: Any = subprocess.Popen(command, **pipes)
    with other:

        def send(word: str) -> None:
            other.stdin.write(f"{word}\n")
            other.stdin.flush()

        try:
            assert other.stdout.readline() == "ready\n"
            store = ResponseStore(path, most)
            # An unfinished response of one server does not fail because another server
            # starts.
            made = ("", "resp_made")
            assert store.get("resp_made").response["status"] == "in_progress"
            # Other servers cannot replace the response, but they can cancel it.
            assert not store.add(stored("resp_made"))
            store.update(stored("resp_made"))
            assert store.get("resp_made").response["status"] == "in_progress"
            send("heartbeat")
            assert other.stdout.readline() == "[]\n"
            store.cancel("resp_made")
            send("heartbeat")
            assert other.stdout.readline() == f"{[made]}\n"
            send("write")
            for number in range(300):
                assert store.add(stored(f"resp_ours_{number}", "x" * 40))
            assert other.stdout.readline() == "done\n"
            ((count, total),) = store._execute(
                "select count(*), sum(length(response) + length(messages)) "
                "from responses"
            )
            assert total <= most
            assert count > 300
            store.delete("resp_made")
            send("heartbeat")
            assert other.stdout.readline() == f"{[made]}\n"
        finally:
            other.kill()


def test_stores_events_with_response(tmp_path):
    path, events = str(tmp_path / "responses.db"), [{"type": "a", "text": "\u00e9"}, {}]
    store, one = ResponseStore(path, MB), stored("resp_1")
    store.put_events("resp_1", events)  # the response is not stored yet
    with pytest.raises(ResponseNotFoundError):
        store.events("resp_1")
    store.add(one)
    assert store.events("resp_1") == []
    store.put_events("resp_1", events)
    assert (store.get("resp_1"), store.events("resp_1")) == (one, events)
    size = size_of([*one, events])
    store = ResponseStore(path, size + size_of(stored("resp_2")) - 1)
    store.add(stored("resp_2"))
    assert not store.has("resp_1")
    store.put_events("resp_2", ["x" * size])
    assert not store.has("resp_2")
    # Updating a response deletes its stored events.
    store.add(one)
    store.put_events("resp_1", events)
    store.update(one)
    assert store.events("resp_1") == []


def test_migrates_earlier_schema(tmp_path):
    path = tmp_path / "responses.db"
    older = sqlite3.connect(path)
    older.execute(
        "create table responses (number integer primary key, id blob unique not null, "
        "response text not null, messages text not null)"
    )
    older.execute(
        "insert into responses (id, response, messages) values (?, ?, ?)",
        (b"resp_1", *map(json.dumps, stored("resp_1"))),
    )
    older.commit()
    older.close()
    for _ in range(2):
        store = ResponseStore(str(path), MB)
        assert store.get("resp_1") == stored("resp_1")
        assert not store.has("resp_2")
        store.add(stored("resp_2"))
        store.put_events("resp_2", [7])
        assert store.events("resp_2") == [7]
        store.delete("resp_2")


def test_rejects_other_files(tmp_path):
    (tmp_path / "text").write_text("no database, and longer than a header " * 10)
    other = sqlite3.connect(tmp_path / "other")
    other.execute("create table responses (name text)")
    other.close()
    wrong: list[Any] = [str(tmp_path / name) for name in ("text", "other", "no/file")]
    wrong += [str(tmp_path), 7]
    for given in wrong:
        said = "response_store must be a file" if isinstance(given, str) else "must be"
        with pytest.raises(ConfigError, match=said) as caught:
            ServerSettings(response_store=given)
        assert caught.value.parameter == "response_store"
    ServerSettings(response_store=str(tmp_path / "new"))
    with pytest.raises(ConfigError, match="max_response_store_bytes"):
        ServerSettings(max_response_store_bytes=-1)


def test_full_disk_does_not_fail_requests(caplog):
    store = ResponseStore(None, MB)
    store._connection.close()
    store.add(stored("resp_1"))
    store.update(stored("resp_1"))
    store.put_events("resp_1", [])
    assert caplog.text.count("could not be stored") == 3


A, B = ("", "a"), ("", "b")


def test_heartbeat_cancels_tasks(monkeypatch):
    monkeypatch.setattr(response_store, "HEARTBEAT_S", 0.01)

    async def run() -> None:
        unwanted, begun = list[tuple[str, str]](), list[tuple[str, str]]()
        background = Background(
            lambda making: [one for one in making if one in unwanted]
        )

        async def work(key: tuple[str, str]) -> None:
            begun.append(key)
            await asyncio.sleep(60)

        for key in (A, B):
            await background.start(key, work(key))
            assert key in begun, "a cancellation would not reach its code"
        unwanted.append(A)
        while A in background:
            await asyncio.sleep(0.01)
        assert B in background
        await background.cancel(B)

    asyncio.run(run())
