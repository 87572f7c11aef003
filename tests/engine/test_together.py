"""Pairs of features that an engine refuses, with errors that name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.helpers import engine
from unisono.config import catalog
from unisono.config.env import TRANSFER_KEY
from unisono.types import ConfigError

FILES_OR_PEERS = "weights cannot be updated while pages are in files or shared with other engines"


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_engines_that_exchange_pages_keep_their_memory(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their peers would read freed pages, or pages of other weights."""
    monkeypatch.setenv(TRANSFER_KEY.name, "secret")
    flags: dict[str, Any] = {} if role == "decode" else {"transfer_listen": f"unix://{tmp_path}/listen"}
    flags |= {} if role == "prefill" else {"prefill_urls": f"unix://{tmp_path}/other"}
    with engine("tiny", enforce_eager=True, enable_sleep_mode=True, role=role, **flags) as llm:
        with pytest.raises(ConfigError, match="an engine that exchanges pages with others cannot sleep"):
            llm.sleep()
        with pytest.raises(ConfigError, match=FILES_OR_PEERS):
            llm.update_weights(str(catalog.bundled_path("tiny")))


def test_weights_stay_while_their_pages_are_in_files(tmp_path: Path) -> None:
    flags = {"cpu_offload_ratio": 2.0, "kv_offload_dir": str(tmp_path), "num_pages": 44}
    with engine("tiny", enforce_eager=True, **flags) as llm, pytest.raises(ConfigError, match=FILES_OR_PEERS):
        llm.update_weights(str(catalog.bundled_path("tiny")))
