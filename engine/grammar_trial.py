"""Compiles grammars in a process that may run out of time or memory, before this one would.

The grammar library bounds most of its work by fuel, but not all: two kilobytes of JSON schema can
take more memory than any machine has. Run as a script, this file is that process. It knows
grammars in Lark's notation and nothing of vocabularies, so what is wrong with one is not its word.
"""

import resource
import signal
import struct
import subprocess
import sys
import weakref

MAX_CPU_S = 2.0
_MAX_MEMORY_BYTES = 1 << 30
_LENGTH = struct.Struct("<Q")
_DONE = b"."


class GrammarTrial:
    """The process, begun when it is first needed and after each death. Used by one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def survives(self, source: str) -> bool:
        """Whether a grammar can be compiled, or refused, within the limits."""
        if self._process is None:
            self._process = _start()
            weakref.finalize(self, _end, self._process)
        data = source.encode()
        try:
            if _ask(self._process, data):
                return True
        except BrokenPipeError:
            pass
        _end(self._process)
        self._process = None
        return False


def _start() -> subprocess.Popen[bytes]:
    # -P: this file's directory is a package, not a place to import from.
    command = [sys.executable, "-P", __file__]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    if not _ask(process, b"start: /a/"):
        _end(process)
        raise RuntimeError("the process in which grammars are tried does not start")
    return process


def _ask(process: subprocess.Popen[bytes], data: bytes) -> bool:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(_LENGTH.pack(len(data)) + data)
    process.stdin.flush()
    return process.stdout.read(1) == _DONE


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _serve() -> None:
    """Compile what comes until nobody is there to ask."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    vocabulary, limits = LLTokenizer("byte"), LLParserLimits(verbose_errors=False)
    while head := sys.stdin.buffer.read(_LENGTH.size):
        source = sys.stdin.buffer.read(*_LENGTH.unpack(head)).decode()
        # The signal's default is death, which needs no cooperation of the library.
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        LLMatcher(vocabulary, source, log_level=0, limits=limits).compute_bitmask()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(_DONE)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
