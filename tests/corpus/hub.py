"""A local HTTP server with the Hugging Face Hub's protocol for data sets, and faults that tests
inject."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """``files``: (repository, name) -> content. ``faults``: name -> what its next GETs do wrong, in
    order.

    A fault is ``("cut", bytes)``: the connection ends after so many; ``("hang", bytes)``: then it
    waits for ``released``; ``("corrupt",)``: one byte is flipped; ``("short", bytes)``: it says and
    sends fewer; ``("status", code)``.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[tuple[str, str], bytes] = {}
        self.faults: dict[str, list[tuple]] = {}
        self.gets: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.released = threading.Event()
        self.hanging = threading.Event()

    def handle_error(self, request, client_address) -> None:
        """A client was killed."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_) -> None:
        pass

    def _json(self, value, status=200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        repository = self.path.removeprefix("/api/datasets/").split("/paths-info/")[0]
        known = self.server.files
        self._json(
            [self._entry(repository, name) for name in form["paths"] if (repository, name) in known]
        )

    def _entry(self, repository: str, name: str) -> dict:
        content = self.server.files[repository, name]
        lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return {"type": "file", "oid": "0" * 40, "size": len(content), "path": name, "lfs": lfs}

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.split("?")[0])
        if path.startswith("/api/datasets/"):
            repository, _, rest = path.removeprefix("/api/datasets/").partition("/revision/")
            if rest:
                return self._json(
                    {"id": repository, "sha": COMMIT, "private": False, "siblings": [], "tags": []}
                )
            repository, _, _ = path.removeprefix("/api/datasets/").partition("/tree/")
            return self._json(
                [self._entry(repo, name) for repo, name in self.server.files if repo == repository]
            )
        if path.startswith("/datasets/"):
            repository, _, rest = path.removeprefix("/datasets/").partition("/resolve/")
            name = rest.partition("/")[2]
            if (repository, name) not in self.server.files:
                return self._json({"error": "Entry not found"}, 404)
            content = self.server.files[repository, name]
            self.send_response(302)
            self.send_header(
                "Location",
                f"http://localhost:{self.server.server_address[1]}/cdn/{repository}/{name}",
            )  # another host
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("X-Linked-Size", str(len(content)))
            self.send_header("X-Linked-Etag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        owner, name, file = path.removeprefix("/cdn/").split("/", 2)
        self._content(file, self.server.files[f"{owner}/{name}", file])

    def _content(self, name: str, content: bytes) -> None:
        fault: tuple = (None,)
        if self.command == "GET":
            self.server.gets[name] += 1
            waiting = self.server.faults.get(name)
            fault = waiting.pop(0) if waiting else fault
        kind, *value = fault
        if kind == "status":
            return self._json({}, value[0])
        if kind == "short":
            content = content[: value[0]]
        if kind == "corrupt":
            content = bytes([content[0] ^ 1]) + content[1:]
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        if start and start >= len(content):
            return self._json({}, 416)
        part = content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(part)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if kind == "hang":
            self.wfile.write(part[: value[0]])
            self.wfile.flush()
            self.server.sent[name] += value[0]
            self.server.hanging.set()
            self.server.released.wait(60)
            self.close_connection = True
            return
        if kind == "cut":
            part = part[: value[0]]
            self.close_connection = True
        self.server.sent[name] += len(part)  # before whoever reads the last byte can look
        self.wfile.write(part)


@contextmanager
def serving() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            hub.released.set()
            hub.shutdown()
            thread.join()
