"""Writes ``tiny-vl`` and ``tiny-vl-eagle3`` as Hugging Face directories, each file at most 16 MiB."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.tiny_vl.head import Head, head_config
from training.tiny_vl.model import FRAMES, LEAST_PIXELS, MERGE, MOST_PIXELS, PATCH, Sizes, TinyVL
from training.tiny_vl.text import Format, save_text

MOST_BYTES = 16 << 20

PROCESSOR = {
    "size": {"shortest_edge": LEAST_PIXELS, "longest_edge": MOST_PIXELS},
    "patch_size": PATCH,
    "temporal_patch_size": FRAMES,
    "merge_size": MERGE,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": 3,
    "processor_class": "Qwen3VLProcessor",
}


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids that config.json names."""
    format = Format(tokenizer)
    return {
        "pad": format.pad, "stop": format.stop, "image": format.image, "video": format.video,
        "vision_start": format.start, "vision_end": format.end,
    }  # fmt: skip


@torch.no_grad()
def round_(module: nn.Module) -> None:
    """Round the parameters in place to bf16, as a checkpoint holds them."""
    for parameter in module.parameters():
        parameter.copy_(parameter.bfloat16())


class Save:
    """Writes both directories under ``out``. recipe: the settings of the run, for training.json."""

    def __init__(self, out: Path, tokenizer: Tokenizer, recipe: dict[str, object]) -> None:
        self.out, self.tokenizer, self.recipe = out, tokenizer, recipe

    def model(self, model: TinyVL, figures: dict[str, object]) -> None:
        """Write ``tiny-vl`` as it is now."""
        folder = self._folder("tiny-vl")
        names = {name: t for name, t in model.hf.state_dict().items() if name != "lm_head.weight"}  # tied
        _write_tensors(folder, names)
        config = model.hf.config.to_dict() | {"architectures": ["Qwen3VLForConditionalGeneration"], "dtype": "bfloat16"}
        for unwanted in ("_name_or_path", "transformers_version", "_attn_implementation"):
            config.pop(unwanted, None)
        _write_json(folder, "config.json", config)
        ids = special_ids(self.tokenizer)
        _write_json(
            folder, "generation_config.json", {"eos_token_id": [ids["stop"], ids["pad"]], "pad_token_id": ids["pad"]}
        )
        _write_json(folder, "preprocessor_config.json", PROCESSOR | {"image_processor_type": "Qwen2VLImageProcessor"})
        _write_json(
            folder, "video_preprocessor_config.json", PROCESSOR | {"video_processor_type": "Qwen3VLVideoProcessor"}
        )
        save_text(self.tokenizer, folder)
        parameters = sum(t.numel() for t in names.values())
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        _write_json(folder, "training.json", {**self.recipe, **figures, "parameters": parameters, "versions": versions})
        _check(folder)

    def head(self, head: Head, rope: dict[str, Any]) -> None:
        """Write ``tiny-vl-eagle3`` as it is now."""
        folder = self._folder("tiny-vl-eagle3")
        vocab = head.sizes.vocab_size
        maps = {"d2t": torch.zeros(vocab, dtype=torch.int64), "t2d": torch.ones(vocab, dtype=torch.bool)}
        _write_tensors(folder, {**head.state_dict(), **maps})
        _write_json(folder, "config.json", head_config(head.sizes, rope))
        _check(folder)

    def _folder(self, name: str) -> Path:
        folder = self.out / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def load_model(folder: Path, sizes: Sizes, tokenizer: Tokenizer) -> TinyVL:
    """The model of a checkpoint, for another run of the head or the measurement."""
    from safetensors.torch import load_file

    model = TinyVL(sizes.config(special_ids(tokenizer)))
    missing, unexpected = model.hf.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"{folder} is not a tiny-vl of these sizes: {[*missing, *unexpected][:3]}")
    return model


def _write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    stored = {
        name: (t.detach().bfloat16() if t.is_floating_point() else t.detach()).cpu().contiguous()
        for name, t in tensors.items()
    }
    partial = folder / "model.safetensors.partial"
    save_file(stored, partial, {"format": "pt"})
    partial.chmod(0o644)
    partial.replace(folder / "model.safetensors")  # a run that is cut off leaves a whole file


def _write_json(folder: Path, name: str, content: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(content, indent=2, default=str) + "\n")


def _check(folder: Path) -> None:
    for file in folder.iterdir():
        if file.stat().st_size > MOST_BYTES:
            raise SystemExit(f"{file} has {file.stat().st_size} bytes; at most {MOST_BYTES} go into the package.")
