"""A Llama with random weights that depend on its KV cache; vLLM's dummy weights are so small that tokens hardly do."""

from __future__ import annotations

import json
from pathlib import Path

VOCABULARY = 2048

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32768,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}


def make(folder: Path) -> Path:
    """Write config and weights into `folder`, unless they are there; the same in every run."""
    config = folder / "config.json"
    if (
        (folder / "model.safetensors").exists()
        and config.exists()
        and json.loads(config.read_text()) == CONFIG
    ):
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    config.write_text(json.dumps(CONFIG))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.12 * noise if parameter.dim() > 1 else 1.0 + 0.1 * noise)
    model.save_pretrained(folder)
    config.write_text(json.dumps(CONFIG))
    return folder
