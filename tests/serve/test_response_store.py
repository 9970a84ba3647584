"""Responses that are kept: how many, how long, and what cannot be."""

import asyncio
import json
import sqlite3
from typing import Any

import pytest

from jaxspec.errors import ConfigError
from jaxspec.serve.response_store import (
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


def size_of(one: Stored) -> int:
    return sum(len(json.dumps(part)) for part in one)


def is_there(store: ResponseStore, response_id: str) -> bool:
    try:
        store.get(response_id)
    except ResponseNotFoundError:
        return False
    return True


@pytest.mark.parametrize("response_id", ["resp_1", "", "resp_\u00e9\x00", "\ud800"])
def test_what_is_put_is_found(response_id):
    store, first = ResponseStore(None, MB), stored(response_id, "\u00e9\x00\u2028")
    store.put(first)
    assert store.get(response_id) == first
    second = stored(response_id, "other")
    store.put(second)
    assert store.get(response_id) == second
    store.delete(response_id)
    with pytest.raises(ResponseNotFoundError):
        store.get(response_id)
    with pytest.raises(ResponseNotFoundError):
        store.delete(response_id)


def test_the_oldest_go_where_all_do_not_fit():
    all_of_them = [stored(f"resp_{number}", "x" * 100) for number in range(10)]
    most = 4 * size_of(all_of_them[0])
    store = ResponseStore(None, most)
    for one in all_of_them:
        store.put(one)
    left = [one.response["id"] for one in all_of_them if is_there(store, one[0]["id"])]
    assert left == ["resp_6", "resp_7", "resp_8", "resp_9"]
    # One that is put again is the newest.
    store.put(all_of_them[6])
    store.put(stored("resp_a", "x" * 100))
    assert is_there(store, "resp_6")
    assert not is_there(store, "resp_7")
    # What is deleted leaves its room to others.
    store.delete("resp_8")
    store.put(stored("resp_b", "x" * 100))
    assert all(is_there(store, one) for one in ("resp_6", "resp_9", "resp_a", "resp_b"))
    store.put(stored("resp_c", "x" * most))
    assert not any(is_there(store, one) for one in ("resp_9", "resp_b", "resp_c"))


def test_a_file_outlives_the_server(tmp_path):
    path = str(tmp_path / "responses.db")
    store = ResponseStore(path, MB)
    for number in range(3):
        store.put(stored(f"resp_{number}", "\u00e9" * 50))
    store.put(stored("resp_3", status="in_progress"))
    store.put(stored("resp_4", status="queued"))
    del store
    later = ResponseStore(path, MB)
    assert later.get("resp_1") == stored("resp_1", "\u00e9" * 50)
    for response_id in ("resp_3", "resp_4"):
        response = later.get(response_id).response
        assert response["status"] == "failed"
        assert response["error"]["message"].startswith("The server ended")
    # What lies there counts, and goes first.
    smaller = ResponseStore(path, 2 * size_of(stored("resp_0", "\u00e9" * 50)) + 400)
    smaller.put(stored("resp_5"))
    assert not is_there(smaller, "resp_0")
    assert is_there(smaller, "resp_5")


def test_what_was_streamed_is_kept_with_the_response(tmp_path):
    path, events = str(tmp_path / "responses.db"), [{"type": "a", "text": "\u00e9"}, {}]
    store, one = ResponseStore(path, MB), stored("resp_1")
    store.put_events("resp_1", events)  # of what is not kept
    with pytest.raises(ResponseNotFoundError):
        store.events("resp_1")
    store.put(one)
    assert store.events("resp_1") == []
    store.put_events("resp_1", events)
    del store
    size = size_of(one) + len(json.dumps(events))
    store = ResponseStore(path, size + size_of(stored("resp_2")) - 1)
    assert (store.get("resp_1"), store.events("resp_1")) == (one, events)
    store.put(stored("resp_2"))
    assert not is_there(store, "resp_1")
    store.put_events("resp_2", ["x" * size])
    assert not is_there(store, "resp_2")
    # Another response of the same id was not streamed.
    for _ in range(2):
        store.put(one)
        assert store.events("resp_1") == []
        store.put_events("resp_1", events)


def test_a_file_of_before_can_hold_events(tmp_path):
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
        store.put_events("resp_1", [7])
        assert store.events("resp_1") == [7]


def test_files_that_are_none(tmp_path):
    (tmp_path / "text").write_text("no database, and longer than a header " * 10)
    other = sqlite3.connect(tmp_path / "other")
    other.execute("create table responses (name text)")
    other.close()
    for name in ("text", "other", "missing/file", "."):
        with pytest.raises(
            ConfigError, match="response_store must be a file"
        ) as caught:
            ServerSettings(response_store=str(tmp_path / name))
        assert caught.value.parameter == "response_store"
    ServerSettings(response_store=str(tmp_path / "new"))
    with pytest.raises(ConfigError, match="max_response_store_bytes"):
        ServerSettings(max_response_store_bytes=-1)


def test_a_full_disk_costs_no_answer(caplog):
    store = ResponseStore(None, MB)
    store._connection.close()
    store.put(stored("resp_1"))
    store.put_events("resp_1", [])
    assert caplog.text.count("could not be kept") == 2


def test_work_that_nobody_waits_for():
    async def run() -> None:
        background, seen = Background(), list[str]()

        async def work(name: str, seconds: float) -> None:
            seen.append(f"{name} begins")
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                seen.append(f"{name} is cancelled")
                raise
            seen.append(f"{name} ends")

        await background.start("a", work("a", 60.0))
        await background.start("b", work("b", 0.5))
        assert seen == ["a begins", "b begins"]
        assert "a" in background
        assert not await background.wait(0.001)
        await background.cancel("a")
        assert seen[2] == "a is cancelled"
        assert "a" not in background
        await background.cancel("a")
        assert await background.wait(60.0)
        assert seen[3:] == ["b ends"]

    asyncio.run(run())


def test_names_of_another_kind_are_refused():
    wrong: Any = {"response_store": 7}
    with pytest.raises(ConfigError, match="response_store"):
        ServerSettings(**wrong)
