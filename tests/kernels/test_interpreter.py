"""Runs the op tests of Triton's kernels in its interpreter, on machines without a GPU.

In a process of its own: the interpreter is chosen when Triton is first imported, and other tests
may have imported it before.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.cases import INTERPRETED, ON_GPU

HERE = Path(__file__).parent
OP_TESTS = [
    "test_dense.py",
    "test_fp8.py",
    "test_lora.py",
    "test_paged_attention.py",
    "test_rope.py",
    "test_sample_tokens.py",
    "test_store_kv.py",
]


@pytest.mark.skipif(ON_GPU, reason="the op tests run the kernels on the GPU")
@pytest.mark.skipif(INTERPRETED, reason="this process is the interpreter's")
@pytest.mark.timeout(900)
def test_triton_kernels_match_reference_in_the_interpreter() -> None:
    files = [str(HERE / name) for name in OP_TESTS]
    flags = ["-q", "-p", "no:cacheprovider", "--confcutdir", str(HERE)]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, *files],
        cwd=HERE.parent.parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-20000:]
    assert "passed" in run.stdout
