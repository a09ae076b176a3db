"""Rewrites a Llama GGUF file as a Hugging Face checkpoint directory in bfloat16.

Knows both layouts: tensor names, the row order of rotary projections, tokenizer fields.
Knows nothing of where the file came from or where the checkpoint will live.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL
TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_checkpoint(gguf_path: Path, directory: Path) -> None:
    """Write weights, configuration and tokenizer of `gguf_path` into `directory`."""
    reader = GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    check_supported(fields)
    weights = directory / "model.safetensors"
    save_file(dict(read_weights(reader, fields)), weights, {"format": "pt"})
    weights.chmod(0o644)  # safetensors leaves it readable by its owner alone
    build_tokenizer(fields).save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])
    write_json(directory / "config.json", model_config(fields))
    write_json(directory / "generation_config.json", generation_config(fields))
    write_json(directory / "tokenizer_config.json", tokenizer_config(fields))


def check_supported(fields: dict[str, Any]) -> None:
    """Refuse files whose meaning this module would have to guess."""
    expected = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.add_bos_token": False,
    }
    for name, value in expected.items():
        if fields.get(name) != value:
            raise ValueError(f"{name} is {fields.get(name)!r}, only {value!r} is converted")
    if any(name.startswith("llama.rope.scaling") for name in fields):
        raise ValueError("rope scaling is not converted")


def read_weights(reader: GGUFReader, fields: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor under its Hugging Face name, dequantised and in bfloat16."""
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = TOP_LEVEL_NAMES.get(tensor.name)
        if name is None:
            _, layer, kind, suffix = tensor.name.split(".")
            if kind in heads:
                weight = restore_rotary_rows(weight, heads[kind])
            name = f"model.layers.{layer}.{LAYER_NAMES[kind]}.{suffix}"
        yield name, torch.from_numpy(weight.copy()).to(torch.bfloat16)


def restore_rotary_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the row order of llama.cpp, which interleaves the two halves of each rotary head."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Return config.json; the output layer shares the embedding, as the file has no other."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": fields["llama.rope.freq_base"],
        },
        # The file stores a float32; its shortest decimal is what the model was trained with.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **special_token_ids(fields),
    }


def generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Return generation_config.json: where to stop, and no sampling defaults."""
    return special_token_ids(fields)


def special_token_ids(fields: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Return tokenizer_config.json for the plain fast tokenizer of tokenizer.json."""
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
    }


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Build the byte-level BPE named "smollm": GPT-2's, with every digit a token of its own."""
    tokens = fields["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return tokenizer


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
