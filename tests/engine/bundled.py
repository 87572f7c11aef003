"""Bundled models and their drafters, for tests of what moves pages."""

from __future__ import annotations

from unisono.types import SpeculativeConfig

SETUPS: dict[str, tuple[str, SpeculativeConfig | None]] = {
    "tiny": ("tiny", None),
    "tiny, eagle3": ("tiny", SpeculativeConfig("eagle3", model="tiny-eagle3", num_speculative_tokens=3)),
    "tiny, mtp": ("tiny", SpeculativeConfig("mtp", model="tiny-mtp", num_speculative_tokens=2)),
    "tiny-hybrid": ("tiny-hybrid", None),
    "tiny-hybrid, mtp": ("tiny-hybrid", SpeculativeConfig("mtp", num_speculative_tokens=1)),
}
