"""As much of the Hugging Face Hub as a resolver sees, in a process of its own.

    python -m tests.resolvers.hub_server PORT ROOT

``ROOT/<organisation>/<repository>/<commit>/`` holds files, ``ROOT/.../refs.json`` says which commit
a branch or tag is. A file ``faults`` in ROOT holds one JSON object a line, each used once for the
first request whose path contains its ``match``: an answer's ``status`` and ``headers``, or
``keep``, after how many bytes the body ends, or ``flip``, to damage it. ``requests`` logs every
request.
"""

import contextlib
import hashlib
import json
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.resolvers.s3_server import free_port

LFS_SUFFIXES = (".safetensors", ".bin")
API = "/api/models/"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path

    def do_GET(self) -> None:
        with (self.root / "requests").open("a") as log:
            log.write(f"{self.path} {self.headers.get('Authorization', 'anonymous')}\n")
        self.fault = self._take_fault()
        if "status" in self.fault:
            headers = {"X-Error-Message": "secret", **self.fault.get("headers", {})}
            return self._answer(self.fault["status"], b"secret", **headers)
        path = urllib.parse.urlsplit(self.path).path
        if path.startswith(API):
            return self._model_info(path.removeprefix(API))
        if path.startswith("/cdn/"):
            return self._answer(200, (self.root / path.removeprefix("/cdn/")).read_bytes())
        repository, _, rest = path.removeprefix("/").partition("/resolve/")
        place = f"{repository}/{urllib.parse.unquote(rest)}"
        if not (self.root / place).is_file():
            return self._answer(404, b"", **{"X-Error-Code": "EntryNotFound"})
        # As for large files: the content is at another host.
        return self._answer(302, b"", Location=f"http://localhost:{self.server_port}/cdn/{place}")

    @property
    def server_port(self) -> int:
        return int(self.connection.getsockname()[1])

    def _model_info(self, path: str) -> None:
        repository, _, revision = path.partition("/revision/")
        moved = self.root / repository / "moved"
        if moved.is_file():
            repository = moved.read_text()
        if not (self.root / repository / "refs.json").is_file():
            return self._answer(401, b"", **{"X-Error-Code": "RepoNotFound"})
        refs = json.loads((self.root / repository / "refs.json").read_text())
        commit = refs.get(urllib.parse.unquote(revision), urllib.parse.unquote(revision))
        folder = self.root / repository / commit
        if not folder.is_dir():
            return self._answer(404, b"", **{"X-Error-Code": "RevisionNotFound"})
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        siblings = [_describe(path, path.relative_to(folder).as_posix()) for path in files]
        info = {"id": repository, "sha": commit, "siblings": siblings}
        self._answer(200, json.dumps(info).encode(), **{"Content-Type": "application/json"})

    def _take_fault(self) -> dict[str, Any]:
        path = self.root / "faults"
        faults = path.read_text().splitlines() if path.is_file() else []
        for index, line in enumerate(faults):
            fault: dict[str, Any] = json.loads(line)
            if fault["match"] in self.path:
                path.write_text("".join(f"{other}\n" for other in faults if other is not line))
                del faults[index]
                return fault
        return {}

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.fault.get("flip"):
            body = bytes([body[0] ^ 1]) + body[1:]
        keep = self.fault.get("keep")
        self.wfile.write(body[:keep])
        self.close_connection = keep is not None

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _describe(path: Path, name: str) -> dict[str, Any]:
    data = path.read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    described = {"rfilename": name, "size": len(data), "blobId": blob}
    if path.suffix in LFS_SUFFIXES:
        sha256 = hashlib.sha256(data).hexdigest()
        described["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 130}
    return described


@dataclass(frozen=True)
class Hub:
    """The server and its files."""

    root: Path
    url: str

    def put(self, repository: str, commit: str, files: dict[str, bytes], *refs: str) -> None:
        """Make a commit, and have branches or tags be it."""
        for name, data in files.items():
            path = self.root / repository / commit / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        path = self.root / repository / "refs.json"
        known = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(known | dict.fromkeys(refs, commit)))

    def fail(self, match: str, *, times: int = 1, **fault: Any) -> None:
        with (self.root / "faults").open("a") as file:
            file.write((json.dumps({"match": match, **fault}) + "\n") * times)

    @property
    def requests(self) -> list[str]:
        path = self.root / "requests"
        return path.read_text().splitlines() if path.is_file() else []


@contextlib.contextmanager
def hub_server(root: Path) -> Iterator[Hub]:
    """Run the server."""
    port = free_port()
    command = [sys.executable, "-m", "tests.resolvers.hub_server", str(port), str(root)]
    process = subprocess.Popen(command, cwd=Path(__file__).resolve().parents[2])
    hub = Hub(root, f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{hub.url}/cdn/requests", timeout=5).close()
                break
            assert process.poll() is None and time.monotonic() < deadline, "no hub"
            time.sleep(0.02)
        (root / "requests").unlink()
        yield hub
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    Handler.root = Path(sys.argv[2])
    with ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler) as server:
        server.serve_forever(0.02)
