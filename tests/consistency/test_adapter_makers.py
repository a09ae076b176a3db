"""On the real engine each adapter shows its own version, whatever ran before it."""

from pathlib import Path

from adapters import LoRARequest, adapter_digest, find_adapter_files
from engine.async_engine import AsyncEngine
from engine.sampling_params import SamplingParams
from tests.consistency.adapter_makers import ForcingAdapters, content_of, save_forced_model
from tests.consistency.soak import promise_config


async def test_each_version_of_a_forcing_adapter_shows_itself(tmp_path: Path) -> None:
    save_forced_model(tmp_path / "model")
    adapters = ForcingAdapters(tmp_path / "adapters")
    config = promise_config(tmp_path, str(tmp_path / "model"), "model")
    engine = AsyncEngine(config.engine.build(tmp_path / "model", num_threads=1))
    await engine.start()
    try:
        for index in (0, 1, 7, 1, 5000):
            path = tmp_path / "adapters" / content_of(index)
            if not path.exists():
                adapters.write(index)
            digest = adapter_digest(find_adapter_files(path))
            lora = LoRARequest(lora_name="policy", lora_path=str(path), digest=digest)
            await engine.load_lora(lora)
            text = ""
            prompt = engine.tokenizer("t5 t6 t7")["input_ids"]
            params = SamplingParams(max_tokens=5, temperature=0)
            async for outputs in engine.generate(str(index), prompt, params, lora=lora):
                text += "".join(output.text for output in outputs)
            assert len(text.split()) == 5
            assert adapters.contents(text) == (content_of(index),)
    finally:
        await engine.stop()
