"""Brings adapters to a GPU ahead of their slots, without stalling the batch that runs there.

Knows streams and pinned memory. Knows nothing of slots or of when an adapter is wanted. Runs on
loaders' threads.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from engine.lora.adapter import LoRAAdapter

# Large enough for the link's bandwidth, small enough to be held for good.
_PIECE_BYTES = 8 << 20


class AdapterUploader:
    """Copies adapters on a stream of its own, through two pieces of pinned memory.

    From memory that is not pinned, which the host cache's is, a transfer would hold up the thread
    that asked for it and might wait for the device. What a call returns has arrived: putting it
    into a slot is then a copy inside the device.
    """

    def __init__(self, device: torch.device, piece_bytes: int = _PIECE_BYTES) -> None:
        self._device = device
        self._lock = threading.Lock()
        is_cuda = device.type == "cuda"
        self._pieces = [
            torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)
        ]
        self._stream: torch.cuda.Stream | None = None
        self._sent: list[torch.cuda.Event] = []
        if is_cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._sent = [torch.cuda.Event() for _ in self._pieces]  # type: ignore[no-untyped-call]

    def upload(self, adapter: LoRAAdapter) -> LoRAAdapter:
        """Return the adapter with everything that a slot takes on the device. Any thread."""
        with self._lock, self._side_stream():
            buffer = self._copy(adapter.buffer)
            changes = {name: change.to(self._device) for name, change in adapter.changes.items()}
        return replace(adapter.with_buffer(buffer), changes=changes)

    def _copy(self, source: torch.Tensor) -> torch.Tensor:
        target = torch.empty_like(source, device=self._device)
        from_bytes, to_bytes = source.view(torch.uint8), target.view(torch.uint8)
        size = self._pieces[0].numel()
        for number, start in enumerate(range(0, from_bytes.numel(), size)):
            part = from_bytes[start : start + size]
            place = number % len(self._pieces)
            piece = self._pieces[place][: part.numel()]
            if self._sent:
                self._sent[place].synchronize()
            piece.copy_(part)
            to_bytes[start : start + size].copy_(piece, non_blocking=True)
            if self._sent:
                self._sent[place].record(self._stream)
        return target

    @contextmanager
    def _side_stream(self) -> Iterator[None]:
        """Use the stream; what was begun on it has ended when the block is left."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()


def keep_for_current_stream(adapter: LoRAAdapter) -> None:
    """Let memory that was taken on the uploader's stream be reused only after this stream's work.

    Without it, what a slot is still being copied from could be overwritten by the next upload.
    """
    changes = [t for change in adapter.changes.values() for t in change.tensors.values()]
    for tensor in (adapter.buffer, *changes):
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
