"""Starts the shipped configuration as a process of its own, as an operator would."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

CHECKOUT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_config(path: Path, *, port: int, state_dir: Path, adapters: Path) -> None:
    """Write serve_config.yaml with another port, state and adapter directory."""
    import yaml

    config = yaml.safe_load((CHECKOUT / "serve_config.yaml").read_text())
    config["http_options"]["port"] = port
    args = config["applications"][0]["args"]
    args["cluster"] = {"state_dir": str(state_dir)}
    args["adapters"]["directories"] = [str(CHECKOUT / "examples/adapters"), str(adapters)]
    path.write_text(yaml.safe_dump(config))


@contextlib.contextmanager
def serve_run(config: Path, log: Path, *, port: int) -> Iterator[str]:
    """Run ``lorafleet serve`` until the block ends; yields the URL once /health is 200."""
    environment = os.environ | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(CHECKOUT),
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("lorafleet")), "serve", str(config)],
            cwd=CHECKOUT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_healthy(url, process, log)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"the server did not become healthy:\n{log.read_text()[-4000:]}")
