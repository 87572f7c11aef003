"""Answers with a LoRA adapter and with the base model in one batch.

The adapter is written here with random weights, in PEFT's format. In its place stands any directory that PEFT saved.
"""

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from unisono import LLM, LoRARequest, SamplingParams
from unisono.config.catalog import bundled_path

RANK, ALPHA = 4, 8


def write_adapter(directory: Path) -> None:
    """An adapter of the query and value projections."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, weight in load_file(bundled_path("tiny") / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(("q_proj", "v_proj")):
            outputs, inputs = weight.shape
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator)
            tensors[f"base_model.model.{module}.lora_B.weight"] = 0.02 * torch.randn(outputs, RANK, generator=generator)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "v_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(Path(folder))
        adapter = LoRARequest("random", 1, folder)
        with LLM("tiny", enable_lora=True, max_num_seqs=4, max_model_len=256) as llm:
            params = SamplingParams(temperature=0, max_tokens=16)
            outputs = llm.generate(["def add(a, b):"] * 2, params, lora_request=[adapter, None])
    for name, output in zip(("adapter", "base"), outputs, strict=True):
        print(f"{name}: {output.outputs[0].text!r}")
