"""All layers in one call compute what the loop over them computes, bit for bit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.config import LoRAConfig
from engine.models.fused_layers import FusedLayers
from engine.models.llama import LlamaBody
from engine.models.paged_model import PagedModel
from kernels.backend import is_available
from tests.engine.models.paged_sequences import Sequences, load_paged, run_in_chunks
from tests.engine.models.test_lora_model import LLAMA_ALL, TinyAdapter, put
from tests.tiny_models import MakeModel

LIMITS = LoRAConfig(max_loras=3, max_cpu_loras=3, max_lora_rank=8)
PROMPT_LENS = (1, 5, 19, 12, 4)
SLOTS = {0: 2, 2: 0, 3: 2}
NUM_DECODES = 5

pytestmark = pytest.mark.skipif(
    not is_available("cpu", "linear"), reason="the C++ extension is not built"
)


@pytest.fixture
def count_fused(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many steps went through the one call so far."""
    steps: list[int] = []
    run = FusedLayers.run

    def counted(self: FusedLayers, stream: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        steps.append(len(stream))
        return run(self, stream, *tables)

    monkeypatch.setattr(FusedLayers, "run", counted)
    return lambda: len(steps)


def load(path: Path, adapters: Path, *, with_adapters: bool) -> PagedModel:
    model = load_paged(path, lora=LIMITS)
    if with_adapters:
        adapters.mkdir()
        put(model, 2, TinyAdapter(model, LLAMA_ALL.split(), rank=8, seed=1), adapters)
        put(model, 0, TinyAdapter(model, ["v_proj", "down_proj"], rank=3, seed=2), adapters)
    return model


def use_loop(model: PagedModel) -> None:
    assert isinstance(model._body, LlamaBody)
    model._body._fused = None


def logits_of(model: PagedModel, slots: dict[int, int] | None) -> torch.Tensor:
    sequences = Sequences([n + NUM_DECODES for n in PROMPT_LENS], model.spec.vocab_size)
    return torch.cat(run_in_chunks(model, sequences, PROMPT_LENS, 7, slots))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_adapters", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_one_call_equals_the_loop(
    make_model: MakeModel,
    tmp_path: Path,
    count_fused: Callable[[], int],
    model_type: str,
    dtype: torch.dtype,
    *,
    with_adapters: bool,
) -> None:
    path = make_model(model_type, dtype=dtype)
    slots = SLOTS if with_adapters else None
    fused = load(path, tmp_path / "fused", with_adapters=with_adapters)
    loop = load(path, tmp_path / "loop", with_adapters=with_adapters)
    use_loop(loop)
    before = count_fused()
    got = logits_of(fused, slots)
    assert count_fused() > before
    before = count_fused()
    expected = logits_of(loop, slots)
    assert count_fused() == before
    assert torch.equal(got, expected)


def test_a_slot_that_is_rewritten_is_seen_by_the_next_step(
    make_model: MakeModel, tmp_path: Path
) -> None:
    model = load(make_model("llama"), tmp_path / "first", with_adapters=True)
    first = logits_of(model, {0: 0})
    model.clear_slot(0)
    base = logits_of(model, {0: 0})
    assert torch.equal(base, logits_of(model, None))
    assert not torch.equal(base, first)
    put(model, 0, TinyAdapter(model, ["v_proj", "down_proj"], rank=3, seed=2), tmp_path)
    assert torch.equal(logits_of(model, {0: 0}), first)


def test_wrong_input_is_an_error_and_not_a_crash(make_model: MakeModel) -> None:
    """Errors come out of the call although it does not hold Python's lock."""
    model = load_paged(make_model("llama"))
    sequences = Sequences([6], model.spec.vocab_size)
    batch = sequences.attention_batch([0], [range(6)])
    batch.block_tables.fill_(10_000)
    rows = torch.arange(6)
    with pytest.raises(RuntimeError, match="block outside the cache"):
        model.forward(sequences.tokens[0], rows, batch, None, rows, None)
