"""Engines that keep evicted pages in host memory and in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.helpers import engine, prompts, tokens
from unisono.types import SamplingParams

HOST: dict[str, Any] = {"num_pages": 44, "cpu_offload_ratio": 6, "snapshot_share": 0.02}


def run_with_files(directory: Path, prompt: list[int], model: str = "tiny", **flags: Any) -> tuple[list[int], Any]:
    """The answer of a new engine to a prompt that it does not know, and its figures. Its files stay."""
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=8, ignore_eos=True)
    with engine(model, enforce_eager=True, kv_offload_dir=str(directory), **{**HOST, **flags}) as llm:
        (output,) = llm.generate([prompt], params)
        tokens(llm, prompts(5, 250, low=180, high=200, seed=3), params)
        llm.engine.check_integrity()
        figures: Any = llm.engine.info()["kv_offload"]
        return output.outputs[0].token_ids, {**figures, "cached": output.num_cached_tokens}
