"""SpeculativeConfig: the drafter of an engine, its checkpoint, and how many tokens it drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unisono.types.draft_tree import Node, leaves, parse_nodes, promising
from unisono.types.errors import ConfigError
from unisono.types.limits import is_int
from unisono.types.outputs import Concise

MAX_DRAFTS = 15
"""Drafts per round at most."""


@dataclass(frozen=True, repr=False)
class SpeculativeConfig(Concise):
    """How drafts are made; the JSON of ``--speculative-config`` has vLLM's names.

    method: a drafter of the catalog. model: its checkpoint, if it has one. num_speculative_tokens: k, drafts per
    round. options: what this method alone understands; the drafter refuses the rest. token_tree: the nodes of a tree of
    drafts (``token_tree.py``), whose depth k then is; empty: a chain. adaptive: draft fewer than k, or nothing, in
    rounds where that brings more tokens a second. draft_tensor_parallel_size: ranks that hold the draft model together,
    all of the target's or 1: each holds it whole; None: as the method does by itself (``DivisibleDrafter``).
    """

    method: str = "none"
    model: str | None = None
    num_speculative_tokens: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)
    token_tree: tuple[Node, ...] = ()
    adaptive: bool = True
    draft_tensor_parallel_size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.adaptive, bool):
            raise ConfigError(f'"adaptive": {self.adaptive!r} of the speculative config: give true or false.')
        divided = self.draft_tensor_parallel_size
        if divided is not None and not (is_int(divided) and divided >= 1):
            raise ConfigError(f"draft_tensor_parallel_size={divided!r}: give a whole number.")
        k = self.num_speculative_tokens
        if not (is_int(k) and 1 <= k <= MAX_DRAFTS):
            way_out = f"give a whole number from 1 to {MAX_DRAFTS}, or the method none to draft nothing."
            raise ConfigError(f"num_speculative_tokens={k!r}: {way_out}")
        if self.model is not None and not (isinstance(self.model, str) and self.model):
            raise ConfigError(f'"model": {self.model!r} of the speculative config: give a directory or a bundled name.')
        if self.token_tree:
            nodes = _tree("speculative_token_tree", parse_nodes, self.token_tree)
            depth = len(nodes[-1])
            if depth > k:
                raise ConfigError(
                    f"speculative_token_tree is {depth} deep, num_speculative_tokens={k}: raise the one (at most "
                    f"{MAX_DRAFTS}, or leave it out) or cut the other."
                )
            object.__setattr__(self, "token_tree", nodes)
            object.__setattr__(self, "num_speculative_tokens", depth)

    @property
    def paths(self) -> tuple[Node, ...]:
        """The tree's paths from root to leaf, two at least; empty for a chain."""
        paths = leaves(self.token_tree)
        return paths if len(paths) > 1 else ()

    @staticmethod
    def parse(given: Mapping[str, Any]) -> SpeculativeConfig:
        """From vLLM's flat form: every key that is no field of this class is an option of the method.

        A tree is ``speculative_token_tree`` (its nodes, as vLLM writes them), or ``topk`` and ``num_draft_tokens``:
        that number of likeliest nodes with at most ``topk`` children each, by the prior of ``token_tree.promising``.
        """
        if not isinstance(given.get("method"), str):
            if "num_speculative_tokens" in given:
                SpeculativeConfig(num_speculative_tokens=given["num_speculative_tokens"])  # it is in range
            asked = ", ".join(f"{name}={value!r}" for name, value in given.items())
            raise ConfigError(
                f'{asked or "the speculative config"}: say how drafts are made, with --speculative-method or "method" '
                "of the speculative config (mtp for the MTP modules of the checkpoint; --help lists all)."
            )
        known = {name: given[name] for name in _FLAT_KEYS if name in given}
        nodes = _asked_tree(given)
        if nodes:
            known["token_tree"] = nodes
            known.setdefault("num_speculative_tokens", min(len(nodes[-1]), MAX_DRAFTS))
        options = {k: v for k, v in given.items() if k not in known and k not in _TREE_KEYS}
        return SpeculativeConfig(**known, options=options)


_FLAT_KEYS = ("method", "model", "num_speculative_tokens", "adaptive", "draft_tensor_parallel_size")
_TREE_KEYS = ("speculative_token_tree", "topk", "num_draft_tokens")


def _asked_tree(given: Mapping[str, Any]) -> tuple[Node, ...]:
    """The nodes that a flat speculative config asks for; none for a chain."""
    explicit, topk, budget = (given.get(name) for name in _TREE_KEYS)
    if explicit is not None:
        if topk is not None or budget is not None:
            raise ConfigError("speculative_token_tree names every node: leave out topk and num_draft_tokens.")
        return _tree("speculative_token_tree", parse_nodes, explicit)
    if topk is None and budget is None:
        return ()
    for name, value in (("topk", topk), ("num_draft_tokens", budget)):
        if not (isinstance(value, int) and is_int(value) and value >= 1):
            raise ConfigError(f"{name}={value!r}: topk and num_draft_tokens go together, whole numbers from 1 on.")
    k = given.get("num_speculative_tokens", SpeculativeConfig.num_speculative_tokens)
    SpeculativeConfig(num_speculative_tokens=k)  # k is in range
    return _tree(f"topk={topk} with num_draft_tokens={budget}", promising, topk, budget, k)


def _tree(what: str, make: Callable[..., tuple[Node, ...]], *given: Any) -> tuple[Node, ...]:
    try:
        return make(*given)
    except ValueError as error:
        raise ConfigError(f"{what}: {error}.") from None
