"""The first contact with a GPU, made while a process imports torch."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any


def start_cuda_context(device: str) -> threading.Thread | None:
    """Create the context of a GPU in a thread: it takes 0.2 to 0.4 s without the GIL, and torch then finds it there.

    device: the engine's flag, ``auto``, ``cuda`` or ``cuda:1``; None for another, which needs no GPU. Any error is
    torch's to report.
    """
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cuda") or (index and not index.isdecimal()):
        return None
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does before its first contact
    thread = threading.Thread(target=_retain, args=(int(index or 0),), name="begin-device", daemon=True)
    thread.start()
    return thread


def _retain(index: int) -> None:
    """Retain a GPU's primary context, which the CUDA runtime uses, too."""
    try:
        library: Any = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if library.cuInit(0) == 0 and library.cuDeviceGet(ctypes.byref(device), index) == 0:
        library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
