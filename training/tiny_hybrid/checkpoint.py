"""Writes ``tiny-hybrid`` as a Hugging Face directory, with the names and settings of released Qwen3.5-MoE checkpoints.

Released checkpoints keep the trunk's experts fused and the MTP module's one by one, and ``A_log`` and the gated norms
in fp32. So does this one.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from training.tiny.documents import END, SPECIAL_TOKENS, STOP
from training.tiny.tokenizer import save_tokenizer
from training.tiny_hybrid.documents import CHAT_TEMPLATE
from training.tiny_hybrid.model import HybridConfig, TinyHybrid

FP32 = ("linear_attn.A_log", "linear_attn.norm.weight")
"""Ends of the names of tensors that are not rounded to bf16."""


def config_json(config: HybridConfig, pad: int, eos: int) -> dict[str, object]:
    """The config.json for transformers; ``pad`` and ``eos`` are token ids."""
    fields = dict(config.__dict__)
    for ours in ("full_attention_interval", "rotary_dims", "rope_theta"):
        del fields[ours]
    sections = config.rotary_dims // 2
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        **fields,
        "layer_types": config.layer_types,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": config.rotary_dims / config.head_dim,
            "mrope_interleaved": True,
            "mrope_section": [sections - 2 * (sections // 3), sections // 3, sections // 3],
        },
        "attn_output_gate": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "router_aux_loss_coef": 0.02,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "pad_token_id": pad,
        "eos_token_id": eos,
    }


def tensors(model: TinyHybrid) -> dict[str, Tensor]:
    """The checkpoint's tensors on the CPU, by name."""
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        stored = (tensor.float() if name.endswith(FP32) else tensor.bfloat16()).cpu()
        if name.startswith("mtp.") and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found |= _one_by_one(name, stored)
        else:
            found[name] = stored.contiguous()
    return found


def round_(model: TinyHybrid) -> None:
    """Round the parameters in place to what a checkpoint holds."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(FP32):
                parameter.copy_(parameter.bfloat16())


def _one_by_one(name: str, stored: Tensor) -> dict[str, Tensor]:
    prefix, _, kind = name.rpartition(".")
    parts = {"gate_proj": 0, "up_proj": 1} if kind == "gate_up_proj" else {"down_proj": 0}
    return {
        f"{prefix}.{expert}.{part}.weight": weight.chunk(len(parts))[half].contiguous()
        for expert, weight in enumerate(stored)
        for part, half in parts.items()
    }


class Save:
    """Writes a checkpoint directory of seven files."""

    def __init__(self, out: Path, tokenizer: Tokenizer, recipe: dict[str, object]) -> None:
        self.out, self.tokenizer, self.recipe = out, tokenizer, recipe
        out.mkdir(parents=True, exist_ok=True)

    def __call__(self, model: TinyHybrid, figures: dict[str, object]) -> None:
        """Write the weights as they are now; ``figures`` go to training.json beside the recipe."""
        stored = tensors(model)
        partial = self.out / "model.safetensors.partial"
        save_file(stored, partial, {"format": "pt"})
        partial.replace(self.out / "model.safetensors")  # a run that is cut off leaves a whole file
        end, stop = SPECIAL_TOKENS.index(END), SPECIAL_TOKENS.index(STOP)  # they are the first ids of the tokenizer
        self._json("config.json", config_json(model.config, pad=end, eos=stop))
        self._json("generation_config.json", {"eos_token_id": [stop, end], "pad_token_id": end})
        save_tokenizer(self.tokenizer, self.out, CHAT_TEMPLATE)
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        parameters = sum(tensor.numel() for tensor in stored.values())
        self._json("training.json", {**self.recipe, **figures, "parameters": parameters, "versions": versions})

    def _json(self, name: str, content: dict[str, object]) -> None:
        (self.out / name).write_text(json.dumps(content, indent=2) + "\n")
