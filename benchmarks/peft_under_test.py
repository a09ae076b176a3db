"""PEFT's own mixed batch, for comparison."""

import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine_under_test import Measured, Workload
from benchmarks.floor import torch_threads


class PeftUnderTest:
    """PEFT's own mixed batch: generate with adapter_names."""

    def __init__(
        self, model: Path, paths: Sequence[Path], threads: int, dtype: torch.dtype
    ) -> None:
        from peft import PeftModel

        self._threads = threads

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
            self._model = PeftModel.from_pretrained(base, str(paths[0]), adapter_name="0")
            for index, path in enumerate(paths[1:], 1):
                self._model.load_adapter(str(path), adapter_name=str(index))
        self._model.to(dtype)
        self._model.eval()

    def run(self, workload: Workload) -> Measured:
        """Generate for every prompt at once, with all threads: an engine leaves torch one."""
        with torch_threads(self._threads):
            return self._run(workload)

    @torch.inference_mode()
    def _run(self, workload: Workload) -> Measured:
        input_ids = torch.tensor(workload.prompts())
        names = [str(index % workload.num_adapters) for index in range(workload.batch)]
        start = time.perf_counter()
        output = self._model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            adapter_names=names,
            max_new_tokens=workload.output_tokens,
            min_new_tokens=workload.output_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
        )
        elapsed = time.perf_counter() - start
        assert output.shape[1] == workload.prompt_tokens + workload.output_tokens
        rate = workload.batch * workload.output_tokens / elapsed
        return Measured(rate, float("nan"), float("nan"), float("nan"))


def fastest_peft(model: Path, paths: Sequence[Path], threads: int) -> PeftUnderTest:
    """PEFT in the dtype that is faster on this machine, by a short probe."""
    probe = Workload(batch=8, num_adapters=8, output_tokens=8)
    candidates = [
        PeftUnderTest(model, paths, threads, dtype) for dtype in (torch.bfloat16, torch.float32)
    ]
    rates = [candidate.run(probe).tokens_per_s for candidate in candidates]
    print(f"PEFT probe: bfloat16 {rates[0]:.1f}, float32 {rates[1]:.1f} tok/s")
    return candidates[rates.index(max(rates))]
