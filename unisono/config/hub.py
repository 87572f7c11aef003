"""Checkpoints by their id on the Hugging Face Hub: from huggingface_hub's cache, or downloaded.

config.json comes first, so that an unsupported model costs one small file; then the small files, then the weight files
that the index names. Environment variables are that library's: HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT.
Imports types and checkpoint_files only.
"""

from __future__ import annotations

import difflib
import glob
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from unisono.config.checkpoint_files import (
    ADAPTER_CONFIG,
    CONFIG,
    INDEX,
    PICKLE,
    WEIGHTS,
    no_config,
    no_weights,
    read_object,
    small_files,
    weight_names,
)
from unisono.types import CheckpointError

SECONDS = 5.0
"""Timeout of the Hub's answer about one file, seconds."""


def is_id(name: str) -> bool:
    """True if ``name`` has the form ``owner/name`` or ``owner/name@revision``."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?", name) is not None


def fetch(name: str, check: Callable[[Path], object] | None = None, weights: bool = True) -> Path:
    """The cached directory of checkpoint ``name``; downloads what is missing.

    check: called with the directory when it has config.json and nothing else was downloaded; an exception ends the
    download. With ``check`` the checkpoint is a model, whose weights must not be pickles; without it, it may be a draft
    head, whose weights may. weights: download the weight files too. Raises CheckpointError.
    """
    repo, _, revision = name.partition("@")
    found = _cached(repo, revision)
    if found is not None and (_is_whole(found) or not weights):
        return found
    with _errors(name, found):
        names = _listing(repo, revision)
        if CONFIG not in names:
            raise CheckpointError(f"{name!r} {_no_config(name, names)}.")
        directory = _download(repo, revision, [CONFIG])
    if check is not None:
        check(directory)
    with _errors(name, found):
        directory = _download(repo, revision, small_files(names))
        if not weights:
            return directory
        index = read_object(directory / INDEX, limit=None) if INDEX in names and WEIGHTS not in names else None
        files = weight_names(names, index, f"{name}: {INDEX}")
        if not files or (check is not None and files == [PICKLE]):
            raise CheckpointError(f"{name!r} has neither {WEIGHTS} nor {INDEX}{no_weights(names)}.")
        return _download(repo, revision, files)


def is_cached(name: str) -> bool:
    """True if the cache has checkpoint ``name`` with its weights."""
    found = _cached(*name.partition("@")[::2])
    return found is not None and _is_whole(found)


def weight_bytes(name: str) -> int:
    """Bytes of the weight files of a checkpoint on the Hub, without downloading them; 0 if the Hub does not report
    them.

    The checkpoint's small files must be in the cache (:func:`fetch` with weights=False). Raises CheckpointError.
    """
    from huggingface_hub import HfApi

    repo, _, revision = name.partition("@")
    found = _cached(repo, revision)
    with _errors(name, found):
        info = HfApi().model_info(repo, revision=revision or None, files_metadata=True, timeout=SECONDS)
    sizes = {each.rfilename: each.size for each in info.siblings or ()}
    index = read_object(found / INDEX, limit=None) if found is not None and (found / INDEX).is_file() else None
    weight_sizes = [sizes.get(file) for file in weight_names(sizes.keys(), index, f"{name}: {INDEX}")]
    return sum(size for size in weight_sizes if size)


def _cached(repo: str, revision: str) -> Path | None:
    """The cache's directory of a revision, complete or not; None without one."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with suppress(LocalEntryNotFoundError):
        patterns = [CONFIG]  # newer versions refuse a snapshot that lacks a file of the listing
        found = Path(snapshot_download(repo, revision=revision or None, local_files_only=True, allow_patterns=patterns))
        return found if (found / CONFIG).is_file() else None
    return None


def _listing(repo: str, revision: str) -> list[str]:
    """The names of a revision's files."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(repo, revision=revision or None, timeout=SECONDS)
    return [each.rfilename for each in info.siblings or ()]


def _download(repo: str, revision: str, files: Sequence[str]) -> Path:
    """The cache's directory of a revision, with these files."""
    from huggingface_hub import snapshot_download

    patterns = [glob.escape(file) for file in files]
    return Path(snapshot_download(repo, revision=revision or None, allow_patterns=patterns, etag_timeout=SECONDS))


def _no_config(name: str, names: Collection[str]) -> str:
    """:func:`no_config` of a listing. An adapter's config is downloaded, because it names the base model."""
    adapter = None
    if ADAPTER_CONFIG in names:
        repo, _, revision = name.partition("@")
        adapter = read_object(_download(repo, revision, [ADAPTER_CONFIG]) / ADAPTER_CONFIG)
    return no_config(names, adapter)


@contextmanager
def _errors(name: str, partial: Path | None) -> Iterator[None]:
    """Turn errors of the library, the network or the disk into a CheckpointError with the cause and the way out.

    partial: the cache's directory, which lacks files; None: the cache has nothing.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repo, _, revision = name.partition("@")
    try:
        yield
        return
    except CheckpointError:
        raise
    except GatedRepoError:
        reason = "it is gated: accept its terms on its page, and set HF_TOKEN"
    except RevisionNotFoundError:
        reason = f"it has no revision {revision!r}"
    except RepositoryNotFoundError:
        reason = "the hub has no such checkpoint, or it is private: check the name, and HF_TOKEN"
    except OfflineModeIsEnabled:
        reason = "HF_HUB_OFFLINE is set, so nothing is downloaded"
    except Exception as error:
        reason = f"the download failed: {_first_line(error)}"
    held = "is not in the cache of the Hugging Face hub" if partial is None else f"is in {partial} without its weights"
    near = _near(repo, Path(constants.HF_HUB_CACHE)) if partial is None else ""
    raise CheckpointError(
        f"{name!r} is not a directory here and {held}, and {reason}.{near} Give a directory, or run "
        f"`hf download {repo}` on a machine with a network."
    )


def _near(repo: str, cache: Path) -> str:
    """An id in the cache that is similar to ``repo``, for a message."""
    ids: list[str] = []
    with suppress(OSError):
        ids = [each.name.removeprefix("models--").replace("--", "/", 1) for each in cache.glob("models--*")]
    found = [each for each in difflib.get_close_matches(repo, ids, 1, 0.75) if each != repo]
    return f" The cache has {found[0]!r}: did you mean that?" if found else ""


def _is_whole(directory: Path) -> bool:
    """True if a download into the cache is complete: the config and every weight file."""
    if not (directory / CONFIG).is_file():
        return False
    if (directory / WEIGHTS).is_file() or not (directory / INDEX).is_file():
        return any(directory.glob("*.safetensors")) or (directory / PICKLE).is_file()
    try:
        files = weight_names([INDEX], read_object(directory / INDEX, limit=None), INDEX)
        return all((directory / file).is_file() for file in files)
    except (CheckpointError, TypeError):
        return True  # the loader reports the error


def _first_line(error: BaseException) -> str:
    """The root cause of an error, in one line. Libraries wrap it in other errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
