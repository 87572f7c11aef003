"""A random assistant for the shape of a Gemma 4, so that rounds with one can be timed.

    python -m benchmarks.gemma_assistant benchmarks/shapes/gemma-4-26b-a4b OUT [--hidden 1024] [--layers 4]

OUT gets model.safetensors and config.json in the form of ``Gemma4AssistantForCausalLM``: layers that attend over the
target's keys, the last of them full. ``--speculative-config '{"model": "OUT", "num_speculative_tokens": 3}'`` uses it;
its drafts are hardly ever right, so time rounds with ``--synthetic-acceptance-length``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def assistant(
    target: dict[str, int], hidden: int, layers: int, inner: int
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """(tensors, layer types) of an assistant of this hidden size, with an MLP of ``inner``."""
    types = ["sliding_attention"] * (layers - 1) + ["full_attention"]
    generator, wide, heads = torch.Generator().manual_seed(0), target["hidden_size"], target["num_attention_heads"]

    def drawn(*shape: int) -> torch.Tensor:
        return (0.02 * torch.randn(*shape, generator=generator)).bfloat16()

    made = {
        "model.embed_tokens.weight": drawn(target["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "pre_projection.weight": drawn(hidden, 2 * wide),
        "post_projection.weight": drawn(wide, hidden),
    }
    for number, kind in enumerate(types):
        size = target["head_dim" if kind == "sliding_attention" else "global_head_dim"]
        layer = {
            "self_attn.q_proj.weight": drawn(heads * size, hidden),
            "self_attn.q_norm.weight": torch.ones(size, dtype=torch.bfloat16),
            "self_attn.o_proj.weight": drawn(hidden, heads * size),
            "mlp.gate_proj.weight": drawn(inner, hidden),
            "mlp.up_proj.weight": drawn(inner, hidden),
            "mlp.down_proj.weight": drawn(hidden, inner),
            "layer_scalar": torch.ones(1, dtype=torch.bfloat16),
        }
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        layer |= {f"{name}_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
        made |= {f"model.layers.{number}.{name}": tensor for name, tensor in layer.items()}
    return made, types


def main() -> None:
    """Write one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--inner", type=int, default=4096, help="of the MLP")
    asked = parser.parse_args()
    tensors, types = assistant(
        json.loads((asked.target / "config.json").read_text()), asked.hidden, asked.layers, asked.inner
    )
    asked.out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, asked.out / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant",
              "text_config": {"layer_types": types}}  # fmt: skip
    (asked.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
