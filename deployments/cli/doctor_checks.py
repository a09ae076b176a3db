"""What ``lorafleet doctor`` looks at: each check finds one cause of trouble and names its cure.

A check returns what it found and never raises. Native libraries are tried in another process,
which may crash.
"""

import asyncio
import email.utils
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

import httpx

from deployments.config import DeploymentConfig
from deployments.paths import find_prepared
from resolvers.base import ResolverError
from resolvers.registry import build_link
from resolvers.store import AdapterStore

MIN_SHARED_MEMORY = 256 << 20
GOOD_SHARED_MEMORY = 1 << 30
MIN_DISK = 5 << 30
# S3 refuses requests that are signed this far from its own time.
MAX_SKEW_S = 300.0
_RESOLVER_TIMEOUT_S = 15.0
_PROBE_TIMEOUT_S = 120.0
_PROBE_NAME = "lorafleet-doctor"

_TORCH_PROBE = """
import torch
print(torch.__version__, torch.version.cuda or torch.version.hip, torch.cuda.is_available())
"""
_KERNELS_PROBE = "from kernels import cpu; print(cpu.available())"


class Level(StrEnum):
    """How bad it is: FAIL keeps something from working, WARN makes it slow or fragile."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found, and what to do about it."""

    check: str
    level: Level
    text: str
    advice: str = ""


def check_torch(*, has_gpu: bool | None = None) -> Finding:
    """Whether torch can be imported and was built for this machine."""
    probe = _run(_TORCH_PROBE)
    if probe.returncode:
        return Finding("torch", Level.FAIL, _last_line(probe.stderr), "install torch again")
    version, platform, available = probe.stdout.split()[-3:]
    return judge_torch(
        version,
        platform,
        is_available=available == "True",
        has_gpu=has_gpu_device() if has_gpu is None else has_gpu,
    )


def judge_torch(version: str, platform: str, *, is_available: bool, has_gpu: bool) -> Finding:
    """Whether this build of torch goes with this machine."""
    text = f"torch {version}"
    if has_gpu and platform == "None":
        return Finding(
            "torch",
            Level.FAIL,
            f"{text} is built for CPUs only, and this machine has a GPU",
            "install a CUDA or ROCm build: see pytorch.org/get-started",
        )
    if has_gpu and not is_available:
        return Finding(
            "torch",
            Level.FAIL,
            f"{text} (for {platform}) does not see this machine's GPU",
            "the driver is older than this build needs, or the container lacks --gpus",
        )
    if platform != "None" and not has_gpu:
        return Finding("torch", Level.OK, f"{text} for {platform}, no GPU here: runs on the CPU")
    return Finding("torch", Level.OK, f"{text}, {'GPU' if is_available else 'CPU'}")


def has_gpu_device() -> bool:
    """Whether the kernel shows a GPU, whatever torch says."""
    return any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/kfd"))


def check_kernels_name() -> Finding:
    """A distribution of another project whose package has the name of one of ours."""
    try:
        found = metadata.distribution("kernels")
    except metadata.PackageNotFoundError:
        return Finding("package kernels", Level.OK, "no other package takes the name")
    return Finding(
        "package kernels",
        Level.FAIL,
        f"the distribution kernels {found.version} hides lorafleet's package of that name",
        "pip uninstall kernels",
    )


def check_cpu_kernels(*, compilers: tuple[str, ...] = ("c++", "g++", "clang++")) -> Finding:
    """Whether the C++ ops are built, or could be."""
    probe = _run(_KERNELS_PROBE)
    if probe.returncode:
        return Finding("CPU kernels", Level.FAIL, _last_line(probe.stderr), "make kernels")
    if probe.stdout.strip().endswith("True"):
        return Finding("CPU kernels", Level.OK, "built")
    names = (os.environ.get("CXX", ""), *compilers)
    compiler = next(filter(None, (shutil.which(name) for name in names if name)), None)
    if compiler is None:
        advice = "install a C++ compiler (on Debian: apt install g++), then `make kernels`"
        return Finding(
            "CPU kernels",
            Level.WARN,
            "no compiler: CPUs run on torch, several times slower",
            advice,
        )
    return Finding(
        "CPU kernels",
        Level.WARN,
        "not built: CPUs run on torch, several times slower",
        "make kernels",
    )


def check_shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """Whether Ray's object store has its place."""
    if not path.is_dir():
        return Finding(
            "shared memory", Level.WARN, f"there is no {path}", "Ray falls back to /tmp, slowly"
        )
    total = shutil.disk_usage(path).total
    text = f"{total / (1 << 30):.2f} GiB in {path}"
    advice = "docker run --shm-size=4g, or an emptyDir with medium Memory at /dev/shm"
    if total < MIN_SHARED_MEMORY:
        return Finding("shared memory", Level.FAIL, text, advice)
    level = Level.OK if total >= GOOD_SHARED_MEMORY else Level.WARN
    return Finding("shared memory", level, text, "" if level is Level.OK else advice)


def check_port(host: str, port: int) -> Finding:
    """Whether the port can be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            advice = "stop what listens there, or choose another: lorafleet serve --port N"
            return Finding("port", Level.FAIL, f"{host}:{port}: {error.strerror}", advice)
    return Finding("port", Level.OK, f"{host}:{port} is free")


def check_model(config: DeploymentConfig) -> Finding:
    """Whether the base model is on this machine."""
    path = find_prepared(config.model)
    if path is None:
        text = f"{config.model} is not on this machine and will be downloaded"
        return Finding("base model", Level.WARN, text, "put it there before many replicas start")
    if not (path / "config.json").is_file():
        return Finding(
            "base model", Level.FAIL, f"{path} has no config.json", "check `model` in the args"
        )
    return Finding("base model", Level.OK, str(path))


def check_directories(config: DeploymentConfig) -> Iterator[Finding]:
    """Whether the node's store and the journal can be written, and have room."""
    places = {
        "adapter store": config.adapters.store_path,
        "journal": config.cluster.journal_path(config.public_model_id).parent,
    }
    for check, path in places.items():
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path):
                pass
        except OSError as error:
            yield Finding(check, Level.FAIL, f"{path}: {error.strerror}", "make it writable")
            continue
        free = shutil.disk_usage(path).free
        text = f"{path}, {free / (1 << 30):.0f} GiB free"
        level = Level.OK if free >= MIN_DISK else Level.WARN
        yield Finding(check, level, text, "" if level is Level.OK else "make room on this disk")


def check_resolvers(config: DeploymentConfig) -> Iterator[Finding]:
    """Whether every resolver answers, asked for a name that nobody has."""
    for entry in config.adapters.entries:
        check = f"resolver {entry['name']}"
        with tempfile.TemporaryDirectory(prefix="lorafleet-doctor-") as directory:
            resolver = build_link(entry, AdapterStore(Path(directory))).resolver
            asked = resolver.resolve_lora(config.public_model_id, _PROBE_NAME)
            try:
                asyncio.run(asyncio.wait_for(asked, _RESOLVER_TIMEOUT_S))
            except TimeoutError:
                text = f"no answer within {_RESOLVER_TIMEOUT_S:g} s"
                yield Finding(check, Level.FAIL, text, "check address, network and proxies")
            except (ResolverError, OSError) as error:
                yield Finding(check, Level.FAIL, str(error), "check address and credentials")
            else:
                yield Finding(check, Level.OK, "answers")


def check_clock(url: str) -> Finding:
    """How far this machine's clock is from another one's."""
    try:
        before = time.time()
        response = httpx.get(f"{url.rstrip('/')}/health", timeout=10)
        now = (before + time.time()) / 2
        theirs = email.utils.parsedate_to_datetime(response.headers["date"]).timestamp()
    except (httpx.HTTPError, KeyError, ValueError) as error:
        return Finding("clock", Level.WARN, f"{url} did not tell its time: {error!r}")
    skew = now - theirs
    # The header has whole seconds.
    text = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} {url}"
    if abs(skew) > MAX_SKEW_S:
        return Finding(
            "clock", Level.FAIL, text, "synchronise the clocks (NTP): S3 refuses such signatures"
        )
    return Finding("clock", Level.OK, text)


def _run(code: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess([], 1, "", f"no answer in {_PROBE_TIMEOUT_S:g} s")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "the process crashed"
