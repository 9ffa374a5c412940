"""Tiny models with weights under which every token depends on the cache, made once into a folder.

Weights are large on purpose: with the usual small ones greedy tokens hardly depend on the KV, and a wrong load would
not be noticed (test_control.py asks for that).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

VOCABULARY = 512
SCALE, VECTOR_SCALE = 0.25, 0.1
TIED_SCALE = 0.02
"""Of embeddings that are the output weights too: larger ones make a model that repeats its input."""
COMMON: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "attention_dropout": 0.0,
}
SLIDING_GEMMA: dict[str, Any] = {
    "sliding_window": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 32,
    "attention_bias": False,
}


def _layers(count: int, full_every: int) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention"]
    return {
        "num_hidden_layers": count,
        "layer_types": [kinds[(i + 1) % full_every == 0] for i in range(count)],
    }


def _gemma3(count: int, full_every: int) -> dict[str, Any]:
    return {
        **COMMON,
        **SLIDING_GEMMA,
        **_layers(count, full_every),
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    }


MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        **COMMON,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 4,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "gemma2": {
        **COMMON,
        **SLIDING_GEMMA,
        **_layers(4, 2),
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "tie_word_embeddings": True,
    },
    "gemma3": _gemma3(6, 6),
    "gemma3odd": _gemma3(8, 4),
    "gpt_oss": {
        **COMMON,
        **_layers(4, 2),
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "sliding_window": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 7.0,
        "attention_bias": True,
    },
    "deepseek": {
        **COMMON,
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_hidden_layers": 3,
        "first_k_dense_replace": 3,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "head_dim": 64,
        "attention_bias": False,
    },
}
"""By name: llama has one group; gemma2 and gpt_oss one full and one sliding; gemma3odd two full layers and six sliding,
in four groups that overlay each other; gemma3 one full and five sliding; deepseek latent attention, of the only size
for which the CPU has a kernel (blocks of 16 tokens)."""


def model(name: str, cache: Path, **changes: Any) -> Path:
    """The folder of the model of that name, made now if `cache` lacks it. changes: of its configuration."""
    config = {**MODELS[name], **changes}
    recipe = json.dumps([config, Path(__file__).read_text()], sort_keys=True)
    folder = cache / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            made = Path(scratch) / "model"
            _make(config, made)
            if not folder.is_dir():
                shutil.move(made, folder)
    return folder


def _make(config: dict[str, Any], folder: Path) -> None:
    """Write config.json and weights; no tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir()
    text = json.dumps(config, indent=1)
    (folder / "config.json").write_text(text)
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    centred_norms = "gemma" in config["model_type"]  # they add 1 themselves
    with torch.no_grad():
        for name, weights in network.named_parameters():
            if weights.dim() >= 2:
                tied = config["tie_word_embeddings"] and "embed" in name
                weights.copy_((TIED_SCALE if tied else SCALE) * torch.randn_like(weights))
            else:
                centre = 1.0 if "norm" in name and not centred_norms else 0.0
                weights.copy_(VECTOR_SCALE * torch.randn_like(weights) + centre)
    network.save_pretrained(folder)
    (folder / "config.json").write_text(text)
