"""Checkpoints by their id on the Hugging Face Hub: from huggingface_hub's cache, else downloaded.

Environment variables are that library's: HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT. Imports types only.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from unisono.types import CheckpointError

FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""What a checkpoint is read from. No pickles, and no code."""

SECONDS = 5.0
"""How long the Hub may take to answer a question about one file."""


def is_id(name: str) -> bool:
    """Whether ``name`` reads as ``owner/name`` or ``owner/name@revision``."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?", name) is not None


def fetch(name: str) -> Path:
    """The cached directory of checkpoint ``name``, downloaded unless it is whole there. Raises CheckpointError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    repo, _, revision = name.partition("@")
    try:
        found = Path(snapshot_download(repo, revision=revision or None, local_files_only=True))
        if _is_whole(found):
            return found
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(
            snapshot_download(repo, revision=revision or None, allow_patterns=list(FILES), etag_timeout=SECONDS)
        )
    except GatedRepoError:
        reason = "it is gated: accept its terms on its page, and set HF_TOKEN"
    except RepositoryNotFoundError:
        reason = "the hub has no such checkpoint, or it is private: check the name, and HF_TOKEN"
    except Exception as error:  # whatever the library, the network or the disk raises
        reason = f"the download failed: {_first_line(error)}"
    raise CheckpointError(
        f"{name!r} is no directory here and is not in the cache of the Hugging Face hub, and {reason}. Give a "
        f"directory, or run `hf download {repo}` where there is a network."
    )


def _is_whole(directory: Path) -> bool:
    """Whether a download into the cache was finished: the config and every file that holds weights."""
    index = directory / "model.safetensors.index.json"
    if not (directory / "config.json").is_file():
        return False
    if not index.is_file():
        return any(directory.glob("*.safetensors"))
    try:
        return all((directory / file).is_file() for file in set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        return True  # its reader says what is wrong with it


def _first_line(error: BaseException) -> str:
    """The cause of an error, which libraries wrap in others, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
