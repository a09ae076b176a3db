"""Asks every adapter of a running fleet for one answer, all at the same time.

    make serve                              # in another terminal
    python examples/multi_lora_client.py [--url http://127.0.0.1:8000]

Knows the OpenAI client and nothing else: an adapter is a model name.
"""

import argparse
import asyncio

from openai import AsyncOpenAI

QUESTIONS = {
    "smollm2-135m-instruct": "What is the capital of Spain?",
    "pirate": "What is the capital of Spain?",
    "bullets": "What is a bicycle?",
    "sql": "Table teachers(id, name, subject, age). Show the names of teachers older than 40.",
    "json_extract": "In Oslo I met Ingrid Dahl, a sailor aged 30.",
    "sentiment": "My headphones stopped working after a week.",
    "haiku": "Write about thunder.",
}


async def ask(client: AsyncOpenAI, model: str, question: str) -> str:
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        temperature=0,
        stream=True,
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def main(url: str) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answers = await asyncio.gather(
            *(ask(client, model, question) for model, question in QUESTIONS.items())
        )
    for (model, question), text in zip(QUESTIONS.items(), answers, strict=True):
        print(f"{model}\n  < {question}\n  > {text.replace(chr(10), chr(10) + '    ')}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One answer from every demo adapter.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    asyncio.run(main(parser.parse_args().url))
