"""What a decode step must move and compute, and how long published hardware would take for it.

    python -m benchmarks.roofline --json OUT

A model, not a measurement: each op takes the longer of its bytes over the device's bandwidth and
its operations over its rate, plus a fixed time for every kernel. The fixed time is an assumption,
stated with the results; without it the LoRA kernels, which move little, would cost nothing. It says
what to expect at best, so that `make gpu-check` can say how far from it a device is.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ADAPTERS = (1, 8, 32, 64)
RANKS = (8, 16, 32, 64)
CONTEXT = 1024
# Which outputs of each group of linears adapters change: every linear, or PEFT's default for Llama.
TARGETS: dict[str, dict[str, tuple[int, ...]]] = {
    "all linears": {"qkv": (0, 1, 2), "o": (0,), "gate_up": (0, 1), "down": (0,)},
    "q and v": {"qkv": (0, 2)},
}
# From one kernel's end to the next one's start inside a replayed CUDA graph. Not published: an
# assumption of this model.
KERNEL_S = 1.5e-6
_FLOAT32 = 4
# Programs above which a decode's contexts are not split on 132 multiprocessors.
_FULL_GRID = 132


@dataclass(frozen=True, slots=True)
class Device:
    """Published peaks: memory bandwidth, and dense bfloat16 matrix products."""

    name: str
    bytes_per_s: float
    flops_per_s: float


# NVIDIA's data sheets of the SXM parts.
DEVICES = (
    Device("H100", 3.35e12, 989e12),
    Device("H200", 4.8e12, 989e12),
)


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes that a step's cost depends on."""

    name: str
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab: int
    element: int = 2

    @property
    def groups(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Linears that share an input: its width, and theirs."""
        heads, kv = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        return {
            "qkv": (self.hidden, (heads, kv, kv)),
            "o": (heads, (self.hidden,)),
            "gate_up": (self.hidden, (self.intermediate, self.intermediate)),
            "down": (self.intermediate, (self.hidden,)),
        }


LLAMA_8B = LlamaShape("Llama 3 8B", 4096, 14336, 32, 32, 8, 128, 128256)


@dataclass(frozen=True, slots=True)
class Op:
    """All calls of one op in a step: each byte counted once, and the kernels that are launched."""

    name: str
    num_bytes: int
    flops: int
    num_kernels: int

    def seconds(self, device: Device, kernel_s: float = KERNEL_S) -> float:
        """Return the predicted time."""
        moving = self.num_bytes / device.bytes_per_s
        return max(moving, self.flops / device.flops_per_s) + self.num_kernels * kernel_s


@dataclass(frozen=True, slots=True)
class Workload:
    """Decodes of one context length, spread evenly over adapters of one rank."""

    batch: int
    num_adapters: int = 0
    rank: int = 0
    targets: str = "all linears"
    context: int = CONTEXT

    @property
    def active_adapters(self) -> int:
        """Return how many adapters the batch can use at once."""
        return min(self.batch, self.num_adapters)


def base_ops(shape: LlamaShape, work: Workload) -> Iterator[Op]:
    """Yield the ops of the base model, in the order of a step."""
    layers, batch, size = shape.num_layers, work.batch, shape.element
    row = batch * shape.hidden * size
    yield Op("embedding", 2 * row, 0, 1)
    yield Op("add_rms_norm", (2 * layers + 1) * 4 * row, (2 * layers + 1) * 5 * row, 2 * layers + 1)
    for name, (inputs, outputs) in shape.groups.items():
        weights = inputs * sum(outputs)
        moved = weights + batch * (inputs + sum(outputs))
        products = layers * 2 * batch * weights
        yield Op(f"linear {name}", layers * moved * size, products, layers)
    kv = shape.num_kv_heads * shape.head_size
    heads = shape.num_heads * shape.head_size
    stored = batch * (2 * heads + 4 * kv) * size
    yield Op("rope_and_store_kv", layers * stored, layers * 6 * batch * (heads + kv), layers)
    read = batch * (2 * work.context * kv + 2 * heads) * size
    # A small batch splits its contexts and merges them with a second kernel.
    kernels = 2 if batch * shape.num_kv_heads <= _FULL_GRID else 1
    attended = layers * 4 * batch * work.context * heads
    yield Op("paged_decode", layers * read, attended, kernels * layers)
    yield Op(
        "silu_and_mul",
        layers * 3 * batch * shape.intermediate * size,
        layers * 5 * batch * shape.intermediate,
        layers,
    )
    weights = shape.hidden * shape.vocab
    moved = (weights + row // size + batch * shape.vocab) * size
    yield Op("linear lm_head", moved, 2 * batch * weights, 1)
    logits = batch * shape.vocab * (size + _FLOAT32)
    yield Op("logits to float32", logits, 0, 1)
    yield Op("sample_tokens", 3 * batch * shape.vocab * _FLOAT32, 2 * batch * shape.vocab, 1)


def lora_ops(shape: LlamaShape, work: Workload) -> Iterator[Op]:
    """Yield what the adapters add: weights of active adapters once, activations of every row."""
    if not work.num_adapters:
        return
    layers, batch, size, rank = shape.num_layers, work.batch, shape.element, work.rank
    for name, targeted in TARGETS[work.targets].items():
        inputs, widths = shape.groups[name]
        outputs = [widths[place] for place in targeted]
        mid = len(outputs) * batch * rank
        shrink = (batch * inputs + work.active_adapters * len(outputs) * rank * inputs) * size
        yield Op(
            f"lora_shrink {name}",
            layers * (shrink + mid * _FLOAT32),
            layers * 2 * mid * inputs,
            layers,
        )
        expand = (work.active_adapters * rank + 2 * batch) * sum(outputs) * size
        yield Op(
            f"lora_expand {name}",
            layers * (expand + mid * _FLOAT32),
            layers * 2 * batch * rank * sum(outputs),
            layers,
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """One workload on one device. `without_kernels` leaves the assumed fixed times out."""

    device: str
    batch: int
    num_adapters: int
    rank: int
    targets: str
    context: int
    step_s: float
    lora_s: float
    tokens_per_s: float
    ratio_to_base: float
    ratio_without_kernels: float
    num_bytes: int
    flops: int


def predict(
    shape: LlamaShape, work: Workload, device: Device, kernel_s: float = KERNEL_S
) -> Prediction:
    """Predict a step, and what it is of the base model's rate."""
    base, lora = [*base_ops(shape, work)], [*lora_ops(shape, work)]

    def total(ops: Sequence[Op], each_s: float) -> float:
        return sum(op.seconds(device, each_s) for op in ops)

    base_s, lora_s = total(base, kernel_s), total(lora, kernel_s)
    return Prediction(
        device=device.name,
        batch=work.batch,
        num_adapters=work.num_adapters,
        rank=work.rank,
        targets=work.targets,
        context=work.context,
        step_s=base_s + lora_s,
        lora_s=lora_s,
        tokens_per_s=work.batch / (base_s + lora_s),
        ratio_to_base=base_s / (base_s + lora_s),
        ratio_without_kernels=total(base, 0.0) / total([*base, *lora], 0.0),
        num_bytes=sum(op.num_bytes for op in (*base, *lora)),
        flops=sum(op.flops for op in (*base, *lora)),
    )


def predictions(shape: LlamaShape = LLAMA_8B) -> list[Prediction]:
    """Predict every batch with the base model alone and with every mix of adapters."""
    adapted = [
        Workload(batch, adapters, rank, targets)
        for batch in BATCHES
        for targets in TARGETS
        for adapters in ADAPTERS
        for rank in RANKS
        if adapters <= batch
    ]
    works = [*map(Workload, BATCHES), *adapted]
    return [predict(shape, work, device) for device in DEVICES for work in works]


def op_table(work: Workload, device: Device) -> str:
    """Return the ops of one step as a table in Markdown."""
    lines = ["| op | MB | GFLOP | kernels | us |", "| --- | --- | --- | --- | --- |"]
    for op in (*base_ops(LLAMA_8B, work), *lora_ops(LLAMA_8B, work)):
        lines.append(
            f"| {op.name} | {op.num_bytes / 1e6:.1f} | {op.flops / 1e9:.2f} | {op.num_kernels} "
            f"| {op.seconds(device) * 1e6:.0f} |"
        )
    return "\n".join(lines)


def ratio_table(rows: Sequence[Prediction], device: str, rank: int, targets: str) -> str:
    """Return the predicted ratio to base of one kind of adapter as a table in Markdown."""
    head = " | ".join(f"{adapters} adapters" for adapters in ADAPTERS)
    lines = [f"| batch | base tokens/s | {head} |", "| --- | --- |" + " --- |" * len(ADAPTERS)]
    for batch in BATCHES:
        own = [row for row in rows if row.device == device and row.batch == batch]
        base = next(row for row in own if not row.num_adapters)
        kind = [row for row in own if row.rank == rank and row.targets == targets]
        ratios = {row.num_adapters: row.ratio_to_base for row in kind}
        cells = " | ".join(
            f"{ratios[adapters]:.3f}" if adapters in ratios else "" for adapters in ADAPTERS
        )
        lines.append(f"| {batch} | {base.tokens_per_s:.0f} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables, and write every prediction as JSON if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the predictions")
    arguments = parser.parse_args()
    rows = predictions()
    print(f"{LLAMA_8B.name}, bfloat16, context {CONTEXT}, {KERNEL_S * 1e6} us for each kernel\n")
    for device in DEVICES:
        for targets in TARGETS:
            for rank in RANKS:
                print(f"{device.name}: decode rate relative to base, rank {rank} on {targets}\n")
                print(ratio_table(rows, device.name, rank, targets) + "\n")
    work = Workload(32, 32, 16)
    print(f"{DEVICES[-1].name}: a step of 32 decodes with 32 adapters of rank 16\n")
    print(op_table(work, DEVICES[-1]))
    if arguments.json:
        report = {
            "shape": dataclasses.asdict(LLAMA_8B),
            "devices": [dataclasses.asdict(device) for device in DEVICES],
            "assumed_kernel_s": KERNEL_S,
            "predictions": [dataclasses.asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
