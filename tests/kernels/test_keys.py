"""Triton's keys of kernels, by which compiled code is kept: the same in every process and order."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import hashlib, importlib, pkgutil, sys
import unisono.kernels
from triton.runtime.jit import JITFunction
from unisono.kernels import library

if "by Triton alone" in sys.argv:
    library.DependenciesFinder._update_hash = library._update_hash
names = [each.name for each in pkgutil.walk_packages(unisono.kernels.__path__, "unisono.kernels.")]
modules = [importlib.import_module(name) for name in names]
found = [(m.__name__, n, f) for m in modules for n, f in vars(m).items() if isinstance(f, JITFunction)]
kernels = sorted(each for each in found if each[2].module == each[0])
for *_, kernel in reversed(kernels) if "backwards" in sys.argv else kernels:
    kernel.cache_key
keys = [(module, name, kernel.cache_key) for module, name, kernel in kernels]
print(len(keys), hashlib.sha256(repr(keys).encode()).hexdigest())
"""


@pytest.mark.parametrize("by_triton", [False, True])
def test_they_do_not_depend_on_the_order(by_triton: bool) -> None:
    """Those of Triton alone do, which is why it is changed; this may end with a version of Triton."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    more = ["by Triton alone"] * by_triton
    commands = [[sys.executable, "-c", SCRIPT, *order, *more] for order in ([], ["backwards"])]
    first, second = (subprocess.run(c, env=env, capture_output=True, text=True, check=True).stdout for c in commands)
    assert int(first.split()[0]) > 250
    assert (first == second) is not by_triton
