"""What DoRA and whole modules cost in a batch, against plain LoRA on the same modules.

    python -m benchmarks.adapter_features --model .cache/models/smollm2-135m-instruct --json OUT

PEFT makes the adapters; all cases run on one machine in turn, and medians are reported.
"""

import argparse
import json
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.engine import run_cases
from benchmarks.engine_under_test import DEFAULT_MODEL, EngineUnderTest, Workload
from benchmarks.machine import measure_machine
from engine import LoRAConfig

BATCH = 8
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

KINDS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "DoRA": {"use_dora": True},
    "embedding": {"target_modules": [*LINEARS, "embed_tokens"]},
    "modules_to_save lm_head": {"modules_to_save": ["lm_head"]},
}


def make_adapter(model: Path, path: Path, kind: str, seed: int) -> Path:
    """Let PEFT save an adapter whose parameters have all moved a little."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        settings = {"r": 8, "lora_alpha": 16, "target_modules": LINEARS, **KINDS[kind]}
        peft = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings))
        with torch.no_grad():
            for parameter in peft.parameters():
                if parameter.requires_grad:
                    parameter += 0.001 * torch.randn_like(parameter)
        peft.save_pretrained(str(path))
    return path


def measure(model: Path, root: Path, *, repeats: int, threads: int, dtype: str) -> dict[str, Any]:
    """Run batches of plain adapters in which none, one or all are of each other kind."""
    paths = {
        kind: [make_adapter(model, root / f"{kind}-{i}", kind, i) for i in range(BATCH)]
        for kind in KINDS
    }
    mixes = {"all plain": paths["plain"]}
    for kind in KINDS:
        if kind != "plain":
            mixes[f"one {kind}, others plain"] = [paths[kind][0], *paths["plain"][1:]]
            mixes[f"all {kind}"] = paths[kind]
    lora = LoRAConfig(max_loras=BATCH, max_cpu_loras=BATCH, max_lora_rank=8)
    workload = Workload(batch=BATCH, num_adapters=BATCH, output_tokens=24)
    return run_cases(
        {
            name: partial(EngineUnderTest(model, lora, mix, threads, dtype).run, workload)
            for name, mix in mixes.items()
        },
        repeats,
    )


def main() -> None:
    """Print the figures, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as root:
        results = measure(
            args.model,
            Path(root),
            repeats=args.repeats,
            threads=args.threads,
            dtype=args.dtype,
        )
    base = results["all plain"]["decode_step_s"]
    for name, figures in results.items():
        step = figures["decode_step_s"]
        print(f"{name:40} {step * 1e3:8.2f} ms a decode step, {step / base:5.2f} of all plain")
    if args.json:
        machine = asdict(measure_machine(torch.device("cpu"), torch.bfloat16))
        args.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
