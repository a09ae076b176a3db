"""Many adapters in one batch, without a server: prompts in, texts out.

    python examples/offline.py [--model .cache/models/smollm2-135m-instruct]

Needs torch and this checkout, neither Ray nor HTTP.
"""

import argparse
import os
from pathlib import Path

from engine import LLM, CacheConfig, LoRAConfig, LoRARequest, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
HOME = Path(os.environ.get("LORAFLEET_HOME") or ROOT / ".cache")
ADAPTERS = ROOT / "examples" / "adapters"
QUESTIONS = {
    None: "What is the capital of Spain?",
    "pirate": "What is the capital of Spain?",
    "sql": "Table teachers(id, name, subject, age). How many teachers are there?",
    "sentiment": "My headphones stopped working after a week.",
}


def main(model: Path) -> None:
    llm = LLM(model, max_model_len=512, cache=CacheConfig(num_blocks=256), lora=LoRAConfig())
    adapters = [
        None if name is None else LoRARequest(lora_name=name, lora_path=str(ADAPTERS / name))
        for name in QUESTIONS
    ]
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS.values()]
    params = SamplingParams(temperature=0, max_tokens=32)
    # One call, one batch: each prompt is answered by its own adapter.
    answers = llm.chat(conversations, params, lora=adapters)
    for name, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{name or 'base model'}: {answer.completions[0].text}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Many adapters in one batch, offline.")
    default = HOME / "models" / "smollm2-135m-instruct"
    parser.add_argument("--model", type=Path, default=default)
    main(parser.parse_args().model)
