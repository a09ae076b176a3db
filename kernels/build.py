"""Builds the C++ extension of the CPU ops: ``python -m kernels.build``.

Knows compilers, flags and where the result lies; the file's name carries a hash of everything that
went into it, so a changed source or torch is a different file and never loads by mistake. Knows
nothing of the ops. Without a compiler it says so and succeeds: the ops then run on torch.
"""

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

MODULE_NAME = "lorafleet_cpu"
SOURCE_DIR = Path(__file__).resolve().parent / "csrc"

# Contracting a * b + c to one instruction is the compiler's default and wanted here; nothing that
# changes results beyond it (-ffast-math) is.
_COMMON_FLAGS = ("-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
_KERNEL_FLAGS = (*_COMMON_FLAGS, "-O3", "-std=c++17", "-fno-math-errno", "-fno-trapping-math")
_MODULE_FLAGS = (*_COMMON_FLAGS, "-O1", "-std=c++20", "-pthread")


@dataclass(frozen=True, slots=True)
class Unit:
    """One object file: a source with the flags that set it apart."""

    name: str
    source: str
    flags: tuple[str, ...]


def _isa_unit(name: str, table: str, vector_bytes: int, *machine_flags: str) -> Unit:
    defines = (f"-DLF_ISA={name}", f"-DLF_TABLE={table}", f"-DLF_VECTOR_BYTES={vector_bytes}")
    return Unit(name, "isa.cpp", (*_KERNEL_FLAGS, *machine_flags, *defines))


def units(machine: str) -> tuple[Unit, ...]:
    """Return what to compile on `machine`; the slowest first."""
    module = Unit("module", "module.cpp", (*_MODULE_FLAGS, f"-DTORCH_EXTENSION_NAME={MODULE_NAME}"))
    portable = _isa_unit("portable", "kPortableKernels", 16)
    if machine not in ("x86_64", "AMD64"):
        return module, portable
    avx2 = _isa_unit("avx2", "kAvx2Kernels", 32, "-mavx2", "-mfma")
    # The CPU check in module.cpp names the same extensions.
    avx512_flags = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma")
    wide = (*avx512_flags, "-mprefer-vector-width=512")
    avx512 = _isa_unit("avx512", "kAvx512Kernels", 64, *wide)
    dots = (*wide, "-mavx512bf16", "-DLF_BF16_DOT=1")
    avx512_bf16 = _isa_unit("avx512_bf16", "kAvx512Bf16Kernels", 64, *dots)
    return module, avx512_bf16, avx512, avx2, portable


def extension_path() -> Path:
    """Return where the extension for this very source, torch and Python lies once it is built."""
    digest = hashlib.sha256()
    for source in sorted(SOURCE_DIR.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    setting = (torch.__version__, sysconfig.get_config_var("SOABI"), units(platform.machine()))
    digest.update(repr(setting).encode())
    return _cache_dir() / f"{MODULE_NAME}-{digest.hexdigest()[:16]}.so"


def load_extension(path: Path) -> ModuleType:
    """Import the extension at `path`; ImportError when the file does not fit this process."""
    loader = importlib.machinery.ExtensionFileLoader(MODULE_NAME, str(path))
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path, loader=loader)
    if spec is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class BuildError(Exception):
    """The compiler or linker refused."""


def build() -> Path:
    """Compile, check that the result loads, and put it in place in one step."""
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler")
    target = extension_path()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as directory:
        work = Path(directory)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compile_one = functools.partial(_compile, compiler, work)
            objects = list(pool.map(compile_one, units(platform.machine())))
        linked = work / target.name
        _run([compiler, "-shared", *map(str, objects), *_link_flags(), "-o", str(linked)])
        load_extension(linked)
        linked.replace(target)
    return target


def find_compiler() -> str | None:
    """Return the C++ compiler to use, if there is one and Python's headers are there for it."""
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return None
    candidates = (os.environ.get("CXX"), "g++", "c++")
    return next(filter(None, (shutil.which(name) for name in candidates if name)), None)


def _compile(compiler: str, work: Path, unit: Unit) -> Path:
    started = time.monotonic()
    target = work / f"{unit.name}.o"
    includes = _include_flags() if unit.name == "module" else ()
    source = str(SOURCE_DIR / unit.source)
    _run([compiler, *unit.flags, *includes, "-c", source, "-o", str(target)])
    _say(f"  {unit.name:8} {time.monotonic() - started:5.1f} s")
    return target


def _include_flags() -> list[str]:
    from torch.utils.cpp_extension import include_paths

    abi = int(torch.compiled_with_cxx11_abi())
    # -isystem: warnings in torch's headers are not ours to mend.
    paths = [*include_paths(), sysconfig.get_paths()["include"]]
    return [f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *(f"-isystem{path}" for path in paths)]


def _link_flags() -> list[str]:
    from torch.utils.cpp_extension import library_paths

    libraries = ("c10", "torch", "torch_cpu", "torch_python")
    return [*(f"-L{path}" for path in library_paths()), *(f"-l{name}" for name in libraries)]


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{' '.join(command)}\n{result.stderr[-4000:]}")
    if result.stderr:
        _say(result.stderr)


def _cache_dir() -> Path:
    home = os.environ.get("LORAFLEET_HOME")
    return (Path(home) if home else SOURCE_DIR.parent.parent / ".cache") / "kernels"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Build unless built already; 0 also when there is nothing to build with."""
    target = extension_path()
    if target.is_file():
        _say(f"CPU kernels are built: {target}")
        return 0
    if find_compiler() is None:
        _say("CPU kernels not built: no C++ compiler or no Python headers. The ops run on torch.")
        return 0
    _say("building CPU kernels")
    started = time.monotonic()
    try:
        build()
    except (BuildError, ImportError) as error:
        _say(f"CPU kernels not built, the ops run on torch:\n{error}")
        return 1
    _say(f"built {target} in {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
