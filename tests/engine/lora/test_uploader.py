"""Adapters reach a device exactly, ahead of their slots, while the running batch goes on.

The uploader is given a CPU here; what differs on a GPU is where its pieces and its copies lie.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from adapters import LoRARequest
from engine import LLM, CacheConfig, LoRAConfig, SamplingParams
from engine.adapter_set import AdapterSet
from engine.config import EngineConfig
from engine.errors import AdapterError
from engine.executor import LocalExecutor
from engine.lora.adapter import LoRAAdapter, load_adapter
from engine.lora.host_cache import HostCache
from engine.lora.prefetcher import AdapterPrefetcher
from engine.lora.uploader import AdapterUploader
from tests.engine.oracle import PeftOracle, train_like_adapter

CPU = torch.device("cpu")
LIMITS = LoRAConfig(max_loras=6, max_cpu_loras=6, max_lora_rank=16)
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
PROMPT = [3 + (7 * place) % 120 for place in range(9)]


class HeldUploader(AdapterUploader):
    """A slow link: nothing arrives until the test lets it."""

    def __init__(self) -> None:
        super().__init__(CPU, piece_bytes=1000)
        self.arrives = threading.Event()
        self.begun: list[str] = []

    def upload(self, adapter: LoRAAdapter) -> LoRAAdapter:
        self.begun.append(adapter.info.lora_name)
        assert self.arrives.wait(30)
        return super().upload(adapter)


@pytest.fixture
def uploader(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldUploader]:
    """Engines made by the test upload through this."""
    held = HeldUploader()
    made = partial(LocalExecutor, uploader=held)
    monkeypatch.setattr("engine.engine.LocalExecutor", made)
    yield held
    held.arrives.set()


def adapter_of(checkpoint: Path, path: Path) -> LoRAAdapter:
    executor = LocalExecutor(
        EngineConfig(model=checkpoint, dtype="float32", cache=CacheConfig(num_blocks=64))
    )
    request = LoRARequest(lora_name=path.name, lora_path=str(path))
    return load_adapter(
        request, executor.targets, LIMITS, torch.float32, base_weight=executor.base_weight
    )


@pytest.mark.parametrize("piece_bytes", [64, 4096, 1 << 22])
def test_what_arrives_is_what_was_sent(checkpoint: Path, tmp_path: Path, piece_bytes: int) -> None:
    train_like_adapter(
        checkpoint, tmp_path / "dora", seed=9, r=4, target_modules=["q_proj"], use_dora=True
    )
    sent = adapter_of(checkpoint, tmp_path / "dora")
    arrived = AdapterUploader(CPU, piece_bytes).upload(sent)
    assert arrived.buffer.data_ptr() != sent.buffer.data_ptr()
    assert torch.equal(arrived.buffer, sent.buffer)
    assert arrived.modules.keys() == sent.modules.keys()
    storage = arrived.buffer.untyped_storage().data_ptr()
    for name, module in sent.modules.items():
        other = arrived.modules[name]
        assert torch.equal(other.lora_a, module.lora_a) and torch.equal(other.lora_b, module.lora_b)
        assert other.lora_a.untyped_storage().data_ptr() == storage
        assert other.lora_b.untyped_storage().data_ptr() == storage
    assert sent.changes and arrived.changes.keys() == sent.changes.keys()
    assert (arrived.info, arrived.rank) == (sent.info, sent.rank)


def make_llm(checkpoint: Path) -> LLM:
    return LLM(checkpoint, dtype="float32", cache=CacheConfig(num_blocks=512), lora=LIMITS)


def add(llm: LLM, request_id: str, path: Path | None, params: SamplingParams) -> None:
    lora = None
    if path is not None:
        adapters = llm.engine.adapters
        assert adapters is not None
        asked = LoRARequest(lora_name=path.name, lora_path=str(path))
        digest = adapters.load(asked).digest
        lora = LoRARequest(lora_name=path.name, lora_path=str(path), digest=digest)
    llm.engine.add_request(request_id, PROMPT, params, lora=lora)


def test_the_running_batch_does_not_wait_for_an_upload(
    checkpoint: Path,
    adapter_paths: dict[str, Path],
    oracle: PeftOracle,
    uploader: HeldUploader,
) -> None:
    llm = make_llm(checkpoint)
    tokens: dict[str, list[int]] = {"base": [], "mlp": []}

    def step() -> None:
        for output in llm.engine.step():
            tokens[output.request_id].extend(output.token_ids)

    add(llm, "base", None, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    step()
    add(llm, "mlp", adapter_paths["mlp"], GREEDY)
    for _ in range(12):
        step()
    # In host memory since before it was asked for, and still on its way.
    assert (len(tokens["base"]), tokens["mlp"], uploader.begun) == (13, [], ["mlp"])
    uploader.arrives.set()
    while llm.engine.has_work:
        step()
    expected = oracle.generate("mlp", PROMPT, NUM_TOKENS)
    assert tokens["mlp"][: len(expected)] == expected


def test_few_are_uploaded_ahead_and_all_are_served(
    checkpoint: Path,
    adapter_paths: dict[str, Path],
    oracle: PeftOracle,
    uploader: HeldUploader,
) -> None:
    llm = make_llm(checkpoint)
    tokens: dict[str, list[int]] = {name: [] for name in adapter_paths}
    for name, path in adapter_paths.items():
        add(llm, name, path, GREEDY)
    adapters = llm.engine.adapters
    assert isinstance(adapters, AdapterSet)
    for _ in range(3):
        assert llm.engine.step() == []
        assert len(adapters.prefetcher._loads) + len(adapters.prefetcher._ready) == 4
    uploader.arrives.set()
    while llm.engine.has_work:
        for output in llm.engine.step():
            tokens[output.request_id].extend(output.token_ids)
    for name in adapter_paths:
        expected = oracle.generate(name, PROMPT, NUM_TOKENS)
        assert tokens[name][: len(expected)] == expected


@pytest.mark.parametrize("fails", [False, True])
def test_what_nobody_waits_for_any_more_keeps_no_place(
    checkpoint: Path, adapter_paths: dict[str, Path], fails: bool
) -> None:
    adapter = adapter_of(checkpoint, adapter_paths["mlp"])
    arrives = threading.Event()

    def load(lora: LoRARequest) -> LoRAAdapter:
        assert arrives.wait(30)
        if fails:
            raise AdapterError("it is gone")
        return adapter

    def request(digest: str) -> LoRARequest:
        return LoRARequest(lora_name=digest, lora_path="somewhere", digest=digest)

    with ThreadPoolExecutor(2) as pool:
        prefetcher = AdapterPrefetcher(HostCache(4), load, pool, max_ahead=1)
        assert not prefetcher.is_ready(request("first"))
        prefetcher.forget("first")
        arrives.set()
        prefetcher._loads["first"].exception()
        # Its failure concerns nobody either.
        assert prefetcher.collect_failures() == {}
        assert not prefetcher.is_ready(request("second"))
        prefetcher._loads["second"].exception()
        assert bool(prefetcher.collect_failures()) == fails
        assert prefetcher.is_ready(request("second")) is not fails
