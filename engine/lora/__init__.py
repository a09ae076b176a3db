"""Adapters inside the engine: parsing, host cache, device slots, LoRA-aware layers."""
