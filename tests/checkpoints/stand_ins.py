"""Local servers that speak the protocols of the Hugging Face Hub and of Kaggle.

They answer the requests of the two client libraries. Nothing leaves the machine:
`only_here` refuses every other address and records the attempts.
"""

import base64
import gc
import hashlib
import json
import os
import re
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub
import kagglehub.clients
import pytest
from huggingface_hub import constants
from kagglesdk import kaggle_env

from jaxspec_checkpoints import CheckpointError
from jaxspec_checkpoints.sources import fetch

COMMIT = "5a" * 20
TOKEN = "hf_right"
KAGGLE_TOKEN = "kaggle_right"

Answer = tuple[int, dict[str, str], bytes]


def files_of(folder: Path) -> dict[str, bytes]:
    """Read a folder's files, by their paths, as the files of a stand-in server."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def as_json(status: int, content: object, **headers: str) -> Answer:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    headers["Content-Type"] = "application/json"
    return status, headers, json.dumps(content).encode()


@dataclass(kw_only=True)
class Asked:
    """One request, as the server saw it."""

    method: str
    host: str
    path: str
    headers: dict[str, str]
    query: dict[str, list[str]]
    body: dict[str, Any]

    @property
    def authorization(self) -> str:
        return self.headers.get("authorization", "")


@dataclass(kw_only=True)
class StandIn:
    """A server's content, its faults, and the requests it received.

    Attributes:
        files: By path in the repository.
        asked: Requests, in order.
        broken: Exceptions raised while answering: mistakes of the stand-in.
        faults: By the path's last part. A status answers with it; "short" sends half
            of the file as if it were whole; "cut" promises the whole file and closes
            the connection half-way.
    """

    files: dict[str, bytes]
    port: int = 0
    faults: dict[str, int | str] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def answer(self, asked: Asked) -> Answer:
        raise NotImplementedError

    @property
    def fetched(self) -> set[str]:
        """Return the names of the files that were downloaded."""
        path = re.compile(rf".*/(?:resolve|storage)/(?:{COMMIT}/)?(.+)")
        found = [path.match(one.path) for one in self.asked if one.method == "GET"]
        return {match[1] for match in found if match}

    @property
    def sent(self) -> dict[str, set[str]]:
        """Return the authorizations that were sent, by host."""
        found: dict[str, set[str]] = {}
        for asked in self.asked:
            found.setdefault(asked.host.split(":")[0], set()).add(asked.authorization)
        return found


@contextmanager
def serve(stand_in: StandIn) -> Iterator[None]:
    """Serve requests on a free port of this machine inside the context."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length)
            parts = urlsplit(self.path)
            asked = Asked(
                method=self.command,
                host=self.headers["Host"],
                path=unquote(parts.path),
                headers={k.lower(): v for k, v in self.headers.items()},
                query=parse_qs(parts.query),
                body=json.loads(body) if body else {},
            )
            stand_in.asked.append(asked)
            status, headers, content = stand_in.answer(asked)
            fault = stand_in.faults.get(asked.path.rsplit("/", 1)[-1])
            is_file = "ETag" in headers and asked.method == "GET" and status == 200
            sent = content[: len(content) // 2] if is_file and fault else content
            promised = content if fault == "cut" else sent
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(promised)))
            self.end_headers()
            if asked.method != "HEAD":
                self.wfile.write(sent)
            if len(promised) != len(sent):
                self.close_connection = True

        do_GET = do_HEAD = do_POST = handle_one  # noqa: N815 the base class's names

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing, to keep the tests' output clean."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Record errors of the stand-in, but ignore clients that disconnect."""
            if not isinstance(sys.exception(), ConnectionError):
                stand_in.broken.append(str(sys.exception()))

    server = Server(("127.0.0.1", 0), Handler)
    stand_in.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert stand_in.broken == []


@dataclass(kw_only=True)
class HubStandIn(StandIn):
    """One repository `google/tiny` of the Hugging Face Hub, at one commit.

    Large files are answered with a redirect to another host, as the hub does: the
    token must not travel there.

    Attributes:
        gated: The files need `TOKEN`; the listing does not.
    """

    repository: ClassVar[str] = "google/tiny"
    gated: bool = False

    def answer(self, asked: Asked) -> Answer:
        api = f"/api/models/{self.repository}"
        resolve = f"/{self.repository}/resolve/{COMMIT}/"
        fault = self.faults.get(asked.path.rsplit("/", 1)[-1])
        if isinstance(fault, int):
            return as_json(fault, {"error": "out of order"})
        if asked.authorization not in ("", f"Bearer {TOKEN}"):
            message = "Invalid credentials in Authorization header"
            return as_json(401, {"error": message}, X_Error_Message=message)
        if asked.path.startswith(f"/storage/{COMMIT}/"):
            return self._file(asked.path.removeprefix(f"/storage/{COMMIT}/"))
        if asked.path.startswith(resolve):
            if self.gated and not asked.authorization:
                message = "Access to this model is restricted."
                return as_json(401, {"error": message}, X_Error_Code="GatedRepo")
            return self._resolve(asked.path.removeprefix(resolve))
        if asked.path == f"{api}/tree/{COMMIT}":
            return self._tree(int(asked.query.get("cursor", ["0"])[0]))
        if asked.path in (f"{api}/revision/{rev}" for rev in ("main", "v1", COMMIT)):
            siblings = [{"rfilename": name} for name in self.files]
            found = {"id": self.repository, "sha": COMMIT, "siblings": siblings}
            return as_json(200, found)
        code = "RevisionNotFound" if asked.path.startswith(api) else "RepoNotFound"
        return as_json(404, {"error": "not found"}, X_Error_Code=code)

    def _is_large(self, name: str) -> bool:
        return name.endswith((".safetensors", ".model", ".bin"))

    def _resolve(self, name: str) -> Answer:
        status, headers, content = self._file(name)
        headers |= {"X-Repo-Commit": COMMIT}
        if not self._is_large(name):
            return status, headers, content
        linked = {
            "X-Linked-Etag": headers.pop("ETag"),
            "X-Linked-Size": str(len(content)),
            "Location": f"http://localhost:{self.port}/storage/{COMMIT}/{name}",
        }
        return 302, headers | linked, b""

    def _file(self, name: str) -> Answer:
        content = self.files[name]
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        return 200, {"ETag": etag, "Content-Type": "application/octet-stream"}, content

    def _tree(self, start: int) -> Answer:
        """Answer a request for the list of files, with two files per page."""
        entries: list[dict[str, Any]] = []
        for name, content in list(self.files.items())[start : start + 2]:
            entry: dict[str, Any] = dict(type="file", path=name, size=len(content))
            entry["oid"] = hashlib.sha1(content).hexdigest()
            if self._is_large(name):
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = dict(oid=sha256, size=len(content), pointerSize=134)
            entries.append(entry)
        headers = {}
        if start + 2 < len(self.files):
            address = f"http://127.0.0.1:{self.port}/api/models/{self.repository}"
            query = f"recursive=True&expand=False&cursor={start + 2}"
            headers["Link"] = f'<{address}/tree/{COMMIT}?{query}>; rel="next"'
        return as_json(200, entries, **headers)


@dataclass(kw_only=True)
class KaggleStandIn(StandIn):
    """One variation `google/tiny/flax/tiny-2b` of a Kaggle model, up to version 2.

    Attributes:
        needs_consent: Requests need `KAGGLE_TOKEN`, whose owner must have accepted
            the licence.
        accepted: Whether the owner of `KAGGLE_TOKEN` has accepted it.
    """

    handle: ClassVar[str] = "google/tiny/flax/tiny-2b"
    needs_consent: bool = False
    accepted: bool = True

    def answer(self, asked: Asked) -> Answer:
        if asked.path.startswith("/storage/"):
            return self._file(asked.path.removeprefix("/storage/"))
        call = asked.path.removeprefix("/v1/models.ModelApiService/")
        if isinstance(fault := self.faults.get(call), int):
            return as_json(fault, {"code": fault, "message": "out of order"})
        if self.needs_consent and asked.authorization != f"Bearer {KAGGLE_TOKEN}":
            return as_json(401, {"code": 401, "message": "Unauthenticated"})
        if self.needs_consent and not self.accepted:
            return as_json(403, {"code": 403, "message": "Permission denied"})
        named = [asked.body.get(key) for key in ("ownerSlug", "modelSlug")]
        named += [asked.body.get("framework"), asked.body.get("instanceSlug")]
        known = ["google", "tiny", "MODEL_FRAMEWORK_FLAX", "tiny-2b"]
        if named != known or asked.body.get("versionNumber", 1) not in (1, 2):
            return as_json(404, {"code": 404, "message": "Not found"})
        if call == "GetModelInstance":
            return as_json(200, {"versionNumber": 2, "slug": "tiny-2b"})
        if call == "ListModelInstanceVersionFiles":
            page = list(self.files)[: asked.body["pageSize"]]
            more = "more" if len(page) < len(self.files) else ""
            files = [{"name": name, "size": len(self.files[name])} for name in page]
            return as_json(200, {"files": files, "nextPageToken": more})
        assert call == "DownloadModelInstanceVersion", call
        # Without a path, kagglehub requests all files as one archive.
        name = asked.body.get("path", "archive.tar.gz")
        return 302, {"Location": f"http://localhost:{self.port}/storage/{name}"}, b""

    def _file(self, name: str) -> Answer:
        content = self.files[name]
        digest = base64.b64encode(hashlib.md5(content).digest()).decode()
        headers = {"ETag": digest, "x-goog-hash": f"md5={digest}"}
        return 200, headers | {"Content-Type": "application/octet-stream"}, content


@contextmanager
def only_here(
    monkeypatch: pytest.MonkeyPatch, error: OSError | None = None
) -> Iterator[list[str]]:
    """Refuse every address but this machine's, and yield the list of refused ones.

    Args:
        error: What a connection to such an address fails with.
    """
    refused: list[str] = []
    lookup, connect = socket.getaddrinfo, socket.socket.connect
    error = error or socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def check(host: Any) -> None:
        if host not in ("127.0.0.1", "::1", "localhost"):
            refused.append(str(host))
            raise error

    def guarded_lookup(host: Any, *args: Any, **kwargs: Any) -> Any:
        check(host)
        return lookup(host, *args, **kwargs)

    def guarded_connect(self: socket.socket, address: Any) -> None:
        check(address[0])
        connect(self, address)

    monkeypatch.setattr(socket, "getaddrinfo", guarded_lookup)
    monkeypatch.setattr(socket.socket, "connect", guarded_connect)
    yield refused


@contextmanager
def hub_alone(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[list[str]]:
    """Keep huggingface_hub away from the user's cache and logins, and `only_here`."""
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.lower(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(home / "agents.json"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # huggingface_hub pauses for seconds before it tries again.
    monkeypatch.setattr(time, "sleep", lambda _: None)
    huggingface_hub.close_session()
    with only_here(monkeypatch) as refused:
        yield refused
    huggingface_hub.close_session()


def point_hub_to(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Replace the address that huggingface_hub read from HF_ENDPOINT at import."""
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@contextmanager
def kaggle_alone(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[list[str]]:
    """Keep kagglehub away from the user's cache and logins, and `only_here`."""
    for variable in os.environ:
        if variable.upper().startswith("KAGGLE") or "PROXY" in variable.upper():
            monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(home / "home"))
    monkeypatch.setenv("KAGGLEHUB_CACHE", str(home / "cache"))
    monkeypatch.setenv("KAGGLE_CONFIG_DIR", str(home / "home"))
    # To describe its caller, kagglehub would search the call stack among all imported
    # modules, which is slow.
    monkeypatch.setattr(kagglehub.clients, "get_user_agent", lambda: "kagglehub")
    with only_here(monkeypatch) as refused:
        yield refused
    # kagglehub does not close the connection of a failed download: the garbage
    # collector does, with a warning.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def point_kaggle_to(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Set the address to which kagglehub sends its requests."""
    endpoints = kaggle_env._env_to_endpoint
    monkeypatch.setitem(endpoints, kaggle_env.KaggleEnv.PROD, endpoint)


def fetch_message(name: str, **arguments: Any) -> str:
    """Download a model, which must fail; return the error, which names the model."""
    with pytest.raises(CheckpointError) as caught:
        fetch(name, **arguments)
    message = str(caught.value)
    assert repr(name) in message or name in message
    return message
