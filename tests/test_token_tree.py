"""Trees as a speculative config writes them: what is understood, which nodes are promising, what is refused."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from unisono.types import ConfigError, SpeculativeConfig
from unisono.types.draft_tree import MAX_PATHS, NEXT, RIGHT, parse_nodes, promising

VLLM = "[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]"


def parsed(**given: Any) -> SpeculativeConfig:
    return SpeculativeConfig.parse({"method": "ngram", **given})


def test_nodes_as_vllm_writes_them() -> None:
    spec = parsed(speculative_token_tree=VLLM, prompt_lookup_max=3)
    assert spec.token_tree == ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
    assert spec.paths == ((0, 0, 0), (0, 1), (1,))
    assert spec.num_speculative_tokens == 3
    assert spec.options == {"prompt_lookup_max": 3}
    assert parsed(speculative_token_tree=[[1], [0], [0, 0], [0, 1], [0, 0, 0], [0]]) == parsed(
        speculative_token_tree=VLLM
    )


def test_the_depth_is_k() -> None:
    assert parsed(speculative_token_tree=VLLM, num_speculative_tokens=7).num_speculative_tokens == 3
    deep = str([(0,) * n for n in range(1, 6)])
    chain = parsed(speculative_token_tree=deep)
    assert (chain.num_speculative_tokens, chain.paths) == (5, ())
    assert SpeculativeConfig("ngram", token_tree=((0,), (1,))).num_speculative_tokens == 1


@pytest.mark.parametrize(("topk", "budget", "k"), [(2, 6, 3), (4, 16, 3), (3, 9, 5), (1, 9, 4), (8, 8, 2), (2, 100, 3)])
def test_the_most_promising_nodes(topk: int, budget: int, k: int) -> None:
    """Against all nodes, ordered by the prior; their parents and elder siblings are among them."""
    every = [node for depth in range(1, k + 1) for node in itertools.product(range(topk), repeat=depth)]
    likely = {node: math.prod(RIGHT * NEXT**digit for digit in node) for node in every}
    chosen = promising(topk, budget, k)
    assert len(chosen) == min(budget, len(every))
    least = min(likely[node] for node in chosen)
    assert all(likely[node] <= least + 1e-12 for node in every if node not in chosen)
    assert parse_nodes(list(chosen)) == chosen
    spec = parsed(topk=topk, num_draft_tokens=budget, num_speculative_tokens=k)
    assert spec.token_tree == chosen
    assert spec.num_speculative_tokens == max(map(len, chosen)) <= k


def test_the_prior_is_a_distribution() -> None:
    assert sum(RIGHT * NEXT**digit for digit in range(200)) == pytest.approx(1)


def test_as_many_paths_as_fit() -> None:
    assert len(parsed(topk=MAX_PATHS, num_draft_tokens=MAX_PATHS, num_speculative_tokens=1).paths) == MAX_PATHS


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"speculative_token_tree": "a tree"}, "'a tree' is not a list of tuples"),
        ({"speculative_token_tree": "__import__('os')"}, "is not a list of tuples"),
        ({"speculative_token_tree": []}, r"\[\] is not a list of tuples, one for each node"),
        ({"speculative_token_tree": 3}, "3 is not a list of tuples"),
        ({"speculative_token_tree": "[0, 1]"}, "0 is not a node: a tuple of whole numbers"),
        ({"speculative_token_tree": [[0], [-1]]}, r"\[-1\] is not a node"),
        ({"speculative_token_tree": [[0], [True]]}, r"\[True\] is not a node"),
        ({"speculative_token_tree": [[0], []]}, r"\[\] is not a node"),
        ({"speculative_token_tree": "[(0,), (1, 0)]"}, r"\(1, 0\) has no parent; add \(1,\)"),
        ({"speculative_token_tree": "[(0,), (2,)]"}, r"\(2,\) has no elder sibling; add \(1,\)"),
        ({"speculative_token_tree": [[d] for d in range(33)]}, "33 leaves, and at most 32 paths"),
        ({"speculative_token_tree": VLLM, "num_speculative_tokens": 2}, "3 deep, num_speculative_tokens=2: raise"),
        ({"speculative_token_tree": VLLM, "num_speculative_tokens": 99}, "num_speculative_tokens=99: give a whole"),
        ({"speculative_token_tree": [[0] * n for n in range(1, 17)]}, "16 deep, num_speculative_tokens=15"),
        ({"speculative_token_tree": VLLM, "topk": 2}, "leave out topk and num_draft_tokens"),
        ({"topk": 2}, "num_draft_tokens=None: topk and num_draft_tokens go together"),
        ({"num_draft_tokens": 4}, "topk=None: topk and num_draft_tokens go together"),
        ({"topk": 0, "num_draft_tokens": 4}, "topk=0: topk and"),
        ({"topk": "2", "num_draft_tokens": 4}, "topk='2': topk and"),
        ({"topk": 2, "num_draft_tokens": 4, "num_speculative_tokens": 0}, "num_speculative_tokens=0: give a whole"),
        ({"topk": 10**6, "num_draft_tokens": 10**12}, "topk=1000000 with num_draft_tokens=1000000000000: it"),
    ],
)  # fmt: skip
def test_invalid_token_trees_raise(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parsed(**given)
