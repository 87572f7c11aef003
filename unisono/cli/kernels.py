"""``pack-kernels``: an archive of the kernels that earlier starts on this machine compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unisono.types import ConfigError


def pack_kernels(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the archives, for UNISONO_KERNELS.")],
    cache: Annotated[Path | None, typer.Option(help="Triton's cache; default: that of starts on this machine.")] = None,
) -> None:
    """Archive the compiled kernels of Triton's cache, so that other machines start without compiling."""
    from triton import knobs

    from unisono import __version__
    from unisono.engine.startup import kernel_archives

    cache = cache or Path(knobs.cache.dir)
    try:
        archives = kernel_archives.pack(cache, out, __version__) if cache.is_dir() else []
    except ValueError as error:
        raise ConfigError(f"{cache}: {error}. Start the models that need an archive with an empty cache.") from error
    if not archives:
        raise ConfigError(f"{cache} has no kernel of this version: start a model on the GPU first, or give --cache.")
    for path in archives:
        manifest = kernel_archives.KernelArchive(path).manifest
        counts = f"{len(manifest.kernels)} kernels, {len(manifest.modules)} C extensions"
        print(f"{path}: {counts}, {path.stat().st_size:,} bytes")
