"""Triton's keys of kernels, by which compiled code is kept: the same in every process and order."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import hashlib, importlib, os, pkgutil, sys
import unisono.kernels
from triton.runtime.jit import JITFunction
from unisono.kernels import library

names = [each.name for each in pkgutil.walk_packages(unisono.kernels.__path__, "unisono.kernels.")]
modules = [importlib.import_module(name) for name in names]
found = [(m.__name__, n, f) for m in modules for n, f in vars(m).items() if isinstance(f, JITFunction)]
kernels = sorted(each for each in found if each[2].module == each[0])
for by_triton in (False, True):
    if (child := os.fork()) == 0:
        if by_triton:
            library.DependenciesFinder._update_hash = library._update_hash
        for *_, kernel in reversed(kernels) if "backwards" in sys.argv else kernels:
            kernel.cache_key
        keys = [(module, name, kernel.cache_key) for module, name, kernel in kernels]
        print(len(keys), hashlib.sha256(repr(keys).encode()).hexdigest(), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
"""Prints the number of kernels and the hash of their keys, as they are and by Triton alone: each in a fork."""


@pytest.fixture(scope="module")
def printed() -> list[list[str]]:
    """The lines of two processes, which take the kernels in two orders."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    commands = [[sys.executable, "-c", SCRIPT, *order] for order in ([], ["backwards"])]
    shown = [subprocess.run(c, env=env, capture_output=True, text=True, check=True).stdout for c in commands]
    return [text.splitlines() for text in shown]


@pytest.mark.parametrize("by_triton", [False, True])
def test_triton_cache_keys_do_not_depend_on_import_order(printed: list[list[str]], by_triton: bool) -> None:
    """Those of Triton alone do, which is why it is changed; this may end with a version of Triton."""
    first, second = (lines[by_triton] for lines in printed)
    assert int(first.split()[0]) > 250
    assert (first == second) is not by_triton
