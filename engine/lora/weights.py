"""Slot weights on the device: one stacked tensor per projection, one place per slot.

Knows shapes, and copies adapters into slots. Knows nothing of which slot to use or when.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from engine.config import LoRAConfig
from engine.lora.adapter import LoRAAdapter
from engine.lora.targets import ModelTargets


@dataclass(frozen=True, slots=True, eq=False)
class SlotWeights:
    """What the kernels read for the P projections that share one input.

    lora_a  [P, slots, max_rank, in]
    lora_b  P tensors [slots, max_rank, out_p]
    ranks   [P, slots] int32     rows from the rank on are undefined and never read; 0 is untargeted
    """

    lora_a: torch.Tensor
    lora_b: tuple[torch.Tensor, ...]
    ranks: torch.Tensor


class LoRAWeights:
    """The slots of every module, allocated when the first adapter targets them.

    ``groups`` lists modules that share their input and are computed together, such as q, k and v;
    a module outside of them is a group of its own.
    """

    def __init__(
        self,
        targets: ModelTargets,
        config: LoRAConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        groups: Sequence[tuple[str, ...]] = (),
    ) -> None:
        self._targets = targets
        self._config = config
        self._dtype = dtype
        self._device = torch.device(device)
        grouped = {name for group in groups for name in group}
        self._groups = [*groups, *((name,) for name in targets if name not in grouped)]
        self._place = {
            name: (number, projection)
            for number, group in enumerate(self._groups)
            for projection, name in enumerate(group)
        }
        self._first_row = [0]
        for group in self._groups:
            self._check_group(group)
            self._first_row.append(self._first_row[-1] + len(group))
        self._ranks = torch.zeros(
            self._first_row[-1], config.max_loras, dtype=torch.int32, device=self._device
        )
        self._modules: list[SlotWeights | None] = [None] * len(self._groups)
        self._slot_ranks = [0] * config.max_loras

    @property
    def slot_ranks(self) -> Sequence[int]:
        """The largest rank in each slot, 0 for an empty one: what ``build_lora_batch`` asks for."""
        return self._slot_ranks

    @property
    def size_bytes(self) -> int:
        """Device memory of what is allocated so far."""
        allocated = [module for module in self._modules if module is not None]
        return sum(m.lora_a.nbytes + sum(b.nbytes for b in m.lora_b) for m in allocated)

    def module(self, name: str) -> SlotWeights | None:
        """The weights of the module's group, None while no adapter has targeted it."""
        return self._modules[self._place[name][0]]

    def allocate(self, names: Iterable[str]) -> None:
        """Allocate the slots of these modules now, so that they never come or move later."""
        for number in {self._place[name][0] for name in names}:
            if self._modules[number] is None:
                self._allocate(number)

    def write_slot(self, slot: int, adapter: LoRAAdapter) -> None:
        """Replace what the slot holds by the adapter. No running step may use the slot."""
        self.clear_slot(slot)
        # One transfer of the whole adapter unless it is there, then copies inside the device.
        if adapter.buffer.device.type != self._device.type:
            adapter = adapter.with_buffer(adapter.buffer.to(self._device))
        sources: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        ranks = torch.zeros(self._first_row[-1], dtype=torch.int32)
        for name, module in adapter.modules.items():
            number, projection = self._place[name]
            weights = self._modules[number] or self._allocate(number)
            ranks[self._first_row[number] + projection] = module.rank
            places.append(weights.lora_a[projection, slot, : module.rank])
            places.append(weights.lora_b[projection][slot, : module.rank])
            sources += (module.lora_a, module.lora_b)
        if places:
            torch._foreach_copy_(places, sources)
        self._ranks[:, slot] = ranks.to(self._device, non_blocking=True)
        self._slot_ranks[slot] = adapter.rank

    def clear_slot(self, slot: int) -> None:
        """Make the slot change nothing."""
        self._ranks[:, slot] = 0
        self._slot_ranks[slot] = 0

    def _allocate(self, number: int) -> SlotWeights:
        group = [self._targets[name] for name in self._groups[number]]
        rows = (self._config.max_loras, self._config.max_lora_rank)

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=self._dtype, device=self._device)

        weights = SlotWeights(
            lora_a=empty(len(group), *rows, group[0].in_features),
            lora_b=tuple(empty(*rows, target.out_features) for target in group),
            ranks=self._ranks[self._first_row[number] : self._first_row[number + 1]],
        )
        self._modules[number] = weights
        return weights

    def _check_group(self, group: tuple[str, ...]) -> None:
        if len({self._targets[name].in_features for name in group}) != 1:
            raise ValueError(f"modules of one group need the same input width: {group}")
