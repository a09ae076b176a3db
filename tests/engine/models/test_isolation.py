"""The start-up check tells models that mix tokens outside attention from those that do not."""

import pytest
import torch

from engine.errors import UnsupportedModelError
from engine.models.isolation import check_isolation
from engine.models.spec import ModelSpec
from kernels.metadata import AttentionBatch, LoRABatch

VOCAB = 17
SPEC = ModelSpec(
    vocab_size=VOCAB,
    num_layers=1,
    num_kv_heads=1,
    head_dim=8,
    windows=(None,),
    max_model_len=64,
    dtype=torch.float32,
    device=torch.device("cpu"),
    hf_config=None,  # type: ignore[arg-type]
)
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))


class ToyModel:
    """A model without attention: each token's logits are a row, plus what `mix` makes of them."""

    def __init__(self, mix: str) -> None:
        self.mix = mix

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBatch,
        lora: LoRABatch | None,
        logits_rows: torch.Tensor,
        logits_lora: LoRABatch | None,
    ) -> torch.Tensor:
        states = TABLE[input_ids]
        if self.mix == "position":
            states = states + positions[:, None]
        elif self.mix == "earlier tokens":
            states = states + 0.1 * states.roll(1, dims=0)
        elif self.mix == "later tokens":
            states = states + 0.1 * states.roll(-1, dims=0)
        elif self.mix == "row number":
            states = states + torch.arange(len(states))[:, None]
        elif self.mix == "nan":
            states = states * float("nan")
        return states[logits_rows]


@pytest.mark.parametrize("mix", ["nothing", "position"])
def test_model_without_mixing_passes(mix: str) -> None:
    check_isolation(ToyModel(mix).forward, lambda num_blocks: None, 4, SPEC)


@pytest.mark.parametrize("mix", ["earlier tokens", "later tokens", "row number", "nan"])
def test_model_that_mixes_tokens_is_refused(mix: str) -> None:
    with pytest.raises(UnsupportedModelError, match="other sequences"):
        check_isolation(ToyModel(mix).forward, lambda num_blocks: None, 4, SPEC)


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_the_cache_asked_for_holds_every_token(block_size: int) -> None:
    allocated: list[int] = []

    class Checked(ToyModel):
        def forward(self, *args: object) -> torch.Tensor:  # type: ignore[override]
            batch = args[2]
            assert isinstance(batch, AttentionBatch)
            positions = batch.slot_mapping
            assert len(positions.unique()) == len(positions)
            assert int(positions.max()) < allocated[-1] * block_size
            return super().forward(*args)  # type: ignore[arg-type]

    check_isolation(Checked("nothing").forward, allocated.append, block_size, SPEC)
    assert allocated
