"""Transformers models with the engine's attention and LoRA-aware layers injected."""
