"""Models of random weights, large enough in their weights that a wrong byte of KV changes the tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": 512,
    "max_position_embeddings": 16384,
    "rope_theta": 10000.0,
    "attention_dropout": 0.0,
    "attention_bias": False,
}
TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
DEMO = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "mlp_bias": False}
GEMMA3 = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 8,
    "layer_types": ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(8)],
    "sliding_window": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 32,
    "rope_local_base_freq": 10000.0,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**COMMON, **TINY, **LLAMA, "num_hidden_layers": 4},
    "gemma3": {**COMMON, **TINY, **GEMMA3},
    "demo": {**COMMON, **DEMO, **LLAMA, "num_hidden_layers": 8},
}


def make(name: str, root: Path) -> Path:
    """The folder of the model; made where it is not there."""
    folder = root / name
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    wanted = MODELS[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(wanted))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    ones = 0.0 if wanted["model_type"].startswith("gemma") else 1.0
    spread = 0.25 * (128 / wanted["hidden_size"]) ** 0.5
    with torch.no_grad():
        for label, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.copy_(spread * torch.randn_like(weight))
            else:
                weight.copy_(0.1 * torch.randn_like(weight) + (ones if "norm" in label else 0.0))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(wanted))  # save_pretrained adds keys of its own
    return folder
