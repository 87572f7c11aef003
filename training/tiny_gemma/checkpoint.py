"""Writes ``tiny-gemma`` and its assistant as Hugging Face directories, with the names of released checkpoints."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from training.tiny.documents import END, SPECIAL_TOKENS, STOP
from training.tiny.tokenizer import save_tokenizer
from training.tiny_gemma.assistant import TinyAssistant
from training.tiny_gemma.model import FULL, SLIDING, GemmaConfig, TinyGemma

WEIGHTS = "model.safetensors"
MODEL, ASSISTANT = "tiny-gemma", "tiny-gemma-assistant"
"""Names of the directories."""

_OURS = "full_attention_interval", "rope_theta", "global_rope_theta", "global_rotary_share", *(
    name for name in GemmaConfig.__dataclass_fields__ if name.startswith("assistant_")
)  # fmt: skip
_EXPERTS = "num_experts", "top_k_experts", "moe_intermediate_size"


def text_config(config: GemmaConfig) -> dict[str, Any]:
    """The config.json of the model, as the text part of released ones."""
    end, stop = SPECIAL_TOKENS.index(END), SPECIAL_TOKENS.index(STOP)  # they are the first ids of the tokenizer
    full = {
        "rope_type": "proportional",
        "rope_theta": config.global_rope_theta,
        "partial_rotary_factor": config.global_rotary_share,
    }
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        **{name: value for name, value in config.__dict__.items() if name not in _OURS},
        "layer_types": config.layer_types,
        "rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": config.rope_theta}, FULL: full},
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "use_cache": True,
        "bos_token_id": None,
        "pad_token_id": end,
        "eos_token_id": stop,
    }


def assistant_config(config: GemmaConfig) -> dict[str, Any]:
    """The config.json of the assistant."""
    layers = len(config.assistant_layers)
    text = {
        **text_config(config),
        "hidden_size": config.assistant_hidden_size,
        "intermediate_size": config.assistant_intermediate_size,
        "num_hidden_layers": layers,
        "layer_types": list(config.assistant_layers),
        "num_kv_shared_layers": layers,
        "enable_moe_block": False,
        "final_logit_softcapping": None,
    }
    for name in ("architectures", *_EXPERTS):
        del text[name]
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": config.hidden_size,
        "text_config": text,
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def round_(module: nn.Module) -> None:
    """Round the parameters in place to what a checkpoint holds."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.bfloat16())


def load_(module: nn.Module, directory: Path) -> None:
    """Load the weights of a directory in place."""
    module.load_state_dict({name: tensor.float() for name, tensor in load_file(directory / WEIGHTS).items()})


class Save:
    """Writes both directories below ``out``; a run that is cut off leaves whole files."""

    def __init__(self, out: Path, tokenizer: Tokenizer, recipe: dict[str, object]) -> None:
        self.out, self.tokenizer, self.recipe = out, tokenizer, recipe
        for name in (MODEL, ASSISTANT):
            (out / name).mkdir(parents=True, exist_ok=True)

    def model(self, model: TinyGemma, figures: dict[str, object]) -> None:
        """Write the model as it is now; ``figures`` go to training.json beside the recipe."""
        folder, text = self.out / MODEL, text_config(model.config)
        parameters = _write(model, folder)
        _json(folder / "config.json", text)
        stops = [text["eos_token_id"], text["pad_token_id"]]
        _json(folder / "generation_config.json", {"eos_token_id": stops, "pad_token_id": text["pad_token_id"]})
        save_tokenizer(self.tokenizer, folder)
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        _json(folder / "training.json", {**self.recipe, **figures, "parameters": parameters, "versions": versions})

    def assistant(self, assistant: TinyAssistant) -> None:
        """Write the assistant as it is now."""
        _write(assistant, self.out / ASSISTANT)
        _json(self.out / ASSISTANT / "config.json", assistant_config(assistant.config))


def _write(module: nn.Module, folder: Path) -> int:
    """Write the weights in bf16; returns their number."""
    stored = {name: tensor.detach().bfloat16().cpu().contiguous() for name, tensor in module.state_dict().items()}
    partial = folder / f"{WEIGHTS}.partial"
    save_file(stored, partial, {"format": "pt"})
    partial.chmod(0o644)  # safetensors creates files that only their owner can read
    partial.replace(folder / WEIGHTS)
    return sum(tensor.numel() for tensor in stored.values())


def _json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
