"""An S3 server in a process of its own, and a proxy before it that misbehaves on demand."""

import contextlib
import functools
import http.client
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import boto3
from botocore.config import Config

BUCKET = "adapters"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "hunter2-secret"}


@dataclass(frozen=True)
class Answer:
    """What the server said, before the proxy passes it on."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Reset(Exception):
    """End the connection with a reset."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong for the next ``times`` requests that match.

    ``before`` runs before the server is asked and may raise Reset, ``instead`` answers without
    asking it, ``change`` replaces its answer, ``keep`` ends the connection after so many bytes of
    the body.
    """

    before: Callable[[], object] | None = None
    change: Callable[[Answer], Answer] | None = None
    keep: int | None = None
    match: str = ""
    times: int = 1
    instead: Callable[[Answer], Answer] | None = None


def refuse(status: int, code: str) -> Callable[[Answer], Answer]:
    """Answer with an error of the S3 protocol."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>secret</Message></Error>"
    return lambda answer: Answer(status, {"Content-Type": "application/xml"}, body.encode())


def reset() -> None:
    raise Reset


@dataclass
class FaultyProxy:
    """Passes S3 requests on; ``seen`` holds every request line and its headers."""

    upstream: int
    faults: list[Fault] = field(default_factory=list)
    seen: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)
    chunk_delay_s: float = 0.0
    port: int = 0

    def count(self, text: str) -> int:
        return sum(text in line for line, _ in self.seen)

    def take_fault(self, line: str) -> Fault | None:
        for index, fault in enumerate(self.faults):
            if fault.match in line:
                if fault.times > 1:
                    self.faults[index] = replace(fault, times=fault.times - 1)
                else:
                    del self.faults[index]
                return fault
        return None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def running(self) -> Iterator["FaultyProxy"]:
        proxy = self

        class Handler(_Handler):
            owner = proxy

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: FaultyProxy

    def do_GET(self) -> None:
        line = f"{self.command} {self.path}"
        self.owner.seen.append((line, dict(self.headers)))
        fault = self.owner.take_fault(line) or Fault()
        try:
            if fault.before is not None:
                fault.before()
            body = self._read_body()
            if fault.instead is not None:
                self._send(fault.instead(Answer(200, {}, b"")), None)
                return
            answer = self._ask(body)
            self._send(answer if fault.change is None else fault.change(answer), fault.keep)
        except Reset:
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True
        except OSError:
            self.close_connection = True  # The client went away.

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _read_body(self) -> bytes | None:
        # http.server answers "Expect: 100-continue" by itself.
        del self.headers["Expect"]
        length = int(self.headers.get("Content-Length", 0))
        return self.rfile.read(length) if length else None

    def _ask(self, body: bytes | None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.owner.upstream, timeout=30)
        try:
            connection.request(self.command, self.path, body, headers=dict(self.headers))
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def _send(self, answer: Answer, keep: int | None) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        body = answer.body if keep is None else answer.body[:keep]
        for start in range(0, len(body), 16384):
            self.wfile.write(body[start : start + 16384])
            if self.owner.chunk_delay_s:
                time.sleep(self.owner.chunk_delay_s)
        if keep is not None:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def s3_server() -> Iterator[int]:
    """Run the server; yields its port."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            assert process.poll() is None and time.monotonic() < deadline, "no S3 server"
            time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


@functools.cache
def _owner(port: int) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id="owner",
        aws_secret_access_key="owner",
        config=Config(retries={"total_max_attempts": 1}),
    )


@dataclass(frozen=True)
class Bucket:
    """One bucket of the server, as its owner sees it."""

    port: int
    name: str

    @property
    def client(self) -> Any:
        return _owner(self.port)

    def create(self) -> None:
        self.client.create_bucket(Bucket=self.name, ACL="public-read")

    def put_adapter(
        self, prefix: str, weights: bytes = b"weights", config: bytes = b"{}", **others: bytes
    ) -> None:
        files = {"adapter_config.json": config, "adapter_model.safetensors": weights, **others}
        client = self.client
        for name, body in files.items():
            client.put_object(
                Bucket=self.name, Key=f"{prefix}/{name}", Body=body, ACL="public-read"
            )
