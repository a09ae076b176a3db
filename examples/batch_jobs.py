"""A file of prompts for many adapters, answered on all machines of a Ray cluster.

    pip install 'lorafleet[batch]'
    python examples/batch_jobs.py --model .cache/models/smollm2-135m-instruct \
        --adapters examples/adapters --input jobs.jsonl --output answers/ --workers 2

Each line of the input is a job: {"id": ..., "adapter": "sql" or null, "prompt": "..."}. The output
has the same lines with "answer", or with "error" for jobs that could not be answered. A worker
loads the base model once and has the jobs of many adapters in one batch; Ray Data divides the
file, restarts what fails and spills what does not fit into memory.
"""

import argparse
from pathlib import Path
from typing import Any

import ray

BATCH_SIZE = 64
MAX_MODEL_LEN = 1024


class Answerer:
    """One worker: an engine with the base model, and adapters as the jobs name them."""

    def __init__(self, model: str, adapters: str, max_tokens: int) -> None:
        # Here, where the work is done: whoever only hands out jobs needs no torch.
        from engine import LLM, CacheConfig, LoRAConfig, SamplingParams

        self._llm = LLM(
            model,
            max_model_len=MAX_MODEL_LEN,
            cache=CacheConfig(num_blocks=1024),
            lora=LoRAConfig(),
        )
        self._params = SamplingParams(temperature=0, max_tokens=max_tokens)
        self._adapters = Path(adapters)

    def __call__(self, batch: Any) -> dict[str, list[Any]]:
        jobs = batch.to_pylist()
        errors, prompts, loras = [], [], []
        for job in jobs:
            prompt, lora, error = self._prepare(job)
            errors.append(error)
            if error is None:
                prompts.append(prompt)
                loras.append(lora)
        answers = iter(self._llm.generate(prompts, self._params, lora=loras))
        texts = [next(answers).completions[0].text if error is None else None for error in errors]
        columns = {name: [job[name] for job in jobs] for name in batch.column_names}
        return {**columns, "answer": texts, "error": errors}

    def _prepare(self, job: dict[str, Any]) -> tuple[list[int], Any, str | None]:
        """A job's prompt and adapter, or what is wrong with it, which fails nobody else's job."""
        from adapters import LoRARequest, validate_adapter_name
        from engine.errors import EngineError

        try:
            lora = None
            if name := job["adapter"]:
                path = self._adapters / validate_adapter_name(name)
                lora = LoRARequest(lora_name=name, lora_path=str(path))
                self._llm.engine.adapters.load(lora)
            messages = [{"role": "user", "content": job["prompt"]}]
            prompt = self._llm.engine.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            if len(prompt) + self._params.max_tokens > MAX_MODEL_LEN:
                raise ValueError(f"{len(prompt)} tokens are too many")
        except (EngineError, ValueError, OSError) as error:
            return [], None, str(error)
        return prompt, lora, None


def answer_all(args: argparse.Namespace) -> None:
    """Answer every job of the input."""
    jobs = ray.data.read_json(str(args.input), lines=True)
    arguments = (str(args.model.resolve()), str(args.adapters.resolve()), args.max_tokens)
    answered = jobs.map_batches(
        Answerer,
        fn_constructor_args=arguments,
        batch_size=BATCH_SIZE,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=args.workers),
        num_cpus=args.num_cpus,
        num_gpus=args.num_gpus,
    )
    answered.write_json(str(args.output.resolve()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Answers a file of jobs, each by its adapter.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, required=True)
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--num-cpus", type=float, default=1, help="of each worker")
    parser.add_argument("--num-gpus", type=float, default=0, help="of each worker")
    parser.add_argument("--max-tokens", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": str(root)}})
    answer_all(parse())
