"""Exact kernels: each shape is compared once, ranks agree, and other bits are not served."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest
import torch

import unisono.kernels
from unisono.kernels.proofs import EXACT_KERNELS, ExactKernel, agreeing


@pytest.fixture
def compared() -> Iterator[tuple[ExactKernel[[str]], list[str]]]:
    """A kernel whose bits differ for shapes that begin with "b", and the comparisons so far."""
    seen: list[str] = []

    def same_bits(shape: str) -> bool:
        seen.append(shape)
        return not shape.startswith("b")

    kernel = ExactKernel("a test's", lambda shape: () if shape == "cpu" else (shape, shape + " too"), same_bits)
    yield kernel, seen
    del EXACT_KERNELS["a test's"]


def test_a_shape_is_compared_once(compared) -> None:
    """A drafter that shares the target's LM head costs no second proof; other bits stay other bits."""
    kernel, seen = compared
    assert not kernel.serves("a")
    assert [kernel.prove("a") for _ in range(3)] == [True] * 3
    assert [kernel.prove("b") for _ in range(3)] == [False] * 3
    assert seen == ["a", "b"]
    assert kernel.serves("a")
    assert kernel.serves("a too")
    assert not kernel.serves("b")
    assert kernel.prove("cpu"), "nothing to compare"
    assert seen == ["a", "b"]


def test_a_rehearsal_proves_nothing(compared) -> None:
    kernel, seen = compared
    kernel.rehearse("a")
    kernel.rehearse("cpu")
    assert seen == ["a"]
    assert not kernel.serves("a")
    assert kernel.prove("a")
    kernel.rehearse("a")
    assert seen == ["a", "a"], "what is proven is compiled"


def test_a_proof_holds_on_all_ranks_or_on_none(compared) -> None:
    kernel, _ = compared
    with agreeing(lambda holds: False):
        assert not kernel.prove("a")
    assert not kernel.serves("a")
    assert not kernel.prove("a"), "it is remembered"


def test_a_trusted_kernel_serves_until_its_bits_differ(compared) -> None:
    kernel, _ = compared
    kernel.trusted = True
    assert kernel.serves("b")
    kernel.prove("b")
    assert not kernel.serves("b")
    assert kernel.serves("c")


def test_a_pass_is_compared_without_and_with_the_kernel(compared) -> None:
    kernel, _ = compared
    assert kernel.same_when_serving("a", lambda: torch.ones(2))
    assert not kernel.same_when_serving("a", lambda: torch.ones(2) + kernel.serves("a"))
    assert not kernel.serves("a"), "a comparison alone serves nothing"


def test_every_exact_kernel_is_registered() -> None:
    for module in pkgutil.walk_packages(unisono.kernels.__path__, "unisono.kernels."):
        importlib.import_module(module.name)
    assert {*EXACT_KERNELS} == {
        "cuBLASLt products", "scaled_mm", "fp8 products of few rows", "products of unpacked int4 weights",
        "int4 products of few rows", "NVFP4 products of few rows", "int8 products of few rows",
        "NVFP4 experts", "int4 experts",
        "products of decoded NVFP4 weights", "products of decoded int8 weights",
        "layer tails", "products with adapters in one launch", "experts of prompts", "fp8 experts of prompts",
        "attention of long prompts", "attention of rounds", "latent attention of long prompts",
        "latent attention of rounds",
    }  # fmt: skip
