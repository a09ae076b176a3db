"""Adapters of mixed kinds that come and go leave nothing behind.

LORAFLEET_CHURN sets how many; a hundred find what grows with every one of them.
"""

import gc
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters import LoRARequest, adapter_digest, find_adapter_files
from engine import LLM, CacheConfig, LoRAConfig, SamplingParams
from tests.engine.matrix.edits import WEIGHTS
from tests.engine.matrix.laboratory import PROMPT, Laboratory

NUM_ADAPTERS = int(os.environ.get("LORAFLEET_CHURN", "2000"))
WARM_UP = 50
KINDS = ("all-linear", "DoRA", "embedding", "bias all", "modules_to_save lm_head", "aLoRA")
KINDS += ("modules_to_save norms", "trainable_token_indices", "lora_bias", "rank 64")
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory("llama, tied", tmp_path_factory.mktemp("churn"), {*KINDS, "plain", "rsLoRA"})


@pytest.fixture(scope="module")
def fresh(
    lab: Laboratory, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], LoRARequest]:
    """An adapter that no engine has seen: one of the kinds with other values, at the same place."""
    root = tmp_path_factory.mktemp("fresh")
    original: dict[str, dict[str, torch.Tensor]] = {}
    for kind in KINDS:
        request = lab.request(kind)
        assert request is not None
        (root / kind).symlink_to(request.lora_path)
        loaded = load_file(root / kind / WEIGHTS)
        # The file is written over, and loading may have mapped it.
        original[kind] = {key: tensor.clone() for key, tensor in loaded.items()}

    def make(number: int) -> LoRARequest:
        kind = KINDS[random.Random(number).randrange(len(KINDS))]
        weights = (root / kind / WEIGHTS).resolve()
        generator = torch.Generator().manual_seed(number)
        changed = {
            # A copy of a base weight must stay one.
            key: tensor
            if key.endswith("base_layer.weight")
            else tensor * (1 + 0.1 * torch.rand(tensor.shape, generator=generator))
            for key, tensor in original[kind].items()
        }
        save_file(changed, weights)
        digest = adapter_digest(find_adapter_files(weights.parent))
        return LoRARequest(lora_name=f"{number}", lora_path=str(weights.parent), digest=digest)

    return make


def answer(llm: LLM, requests: list[LoRARequest | None]) -> list[tuple[object, ...]]:
    results = llm.generate([PROMPT] * len(requests), PARAMS, lora=requests)
    completions = [result.completions[0] for result in results]
    return [(tuple(item.token_ids), tuple(item.logprobs)) for item in completions]


def test_memory_and_a_pinned_adapter_stay_as_they_are(
    lab: Laboratory,
    fresh: Callable[[int], LoRARequest],
    record_property: Callable[[str, object], None],
) -> None:
    llm = LLM(
        lab.checkpoint,
        dtype="float32",
        num_threads=1,
        lora=LoRAConfig(max_loras=4, max_cpu_loras=6, max_lora_rank=64),
        cache=CacheConfig(num_blocks=64, enable_prefix_caching=False),
    )
    adapters = llm.engine.adapters
    assert adapters is not None
    pinned = lab.request("rsLoRA")
    assert pinned is not None
    digest = adapters.load(pinned).digest
    adapters.pin(digest, in_slot=True)
    expected = answer(llm, [pinned])
    before = 0
    for number in range(NUM_ADAPTERS):
        request = fresh(number)
        assert answer(llm, [request])[0] != expected[0]
        if number % 10 == 0:
            assert answer(llm, [pinned]) == expected, f"after {number} adapters"
        if number % 3 == 0:
            assert request.digest is not None
            adapters.remove(request.digest)
        if number == WARM_UP:
            before = resident_bytes()
    growth = resident_bytes() / before - 1
    record_property("growth of memory", growth)
    assert growth < 0.02, f"memory grew by {growth:.1%}"
