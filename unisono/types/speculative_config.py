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
"""Most drafts per round."""


@dataclass(frozen=True, repr=False)
class SpeculativeConfig(Concise):
    """The drafter and its settings; the JSON of ``--speculative-config`` has vLLM's names.

    method: a drafter of the catalog. model: its checkpoint, if it has one. num_speculative_tokens: k, drafts per round.
    options: settings of this method; the drafter refuses unknown ones. token_tree: nodes of a draft tree
    (``draft_tree.py``), whose depth is k; empty: a chain. adaptive: draft fewer than k tokens, or none, in rounds where
    that gives more tokens per second. draft_tensor_parallel_size: ranks that share the draft model: all of the
    target's, or 1 (each holds it whole); None: the method's own default (``DivisibleDrafter``). share_drafts: rounds
    with fewer than k drafts give each request its own number within a common budget; None: by drafter and device
    (``startup.capture_candidates.shared_choices``).
    """

    method: str = "none"
    model: str | None = None
    num_speculative_tokens: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)
    token_tree: tuple[Node, ...] = ()
    adaptive: bool = True
    draft_tensor_parallel_size: int | None = None
    share_drafts: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.adaptive, bool):
            raise ConfigError(f'"adaptive": {self.adaptive!r} of the speculative config: give true or false.')
        if not isinstance(self.share_drafts, bool | None):
            raise ConfigError(f'"share_drafts": {self.share_drafts!r} of the speculative config: give true or false.')
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
        """The tree's paths from root to leaf, at least two; empty for a chain."""
        paths = leaves(self.token_tree)
        return paths if len(paths) > 1 else ()

    @staticmethod
    def parse(config: Mapping[str, Any]) -> SpeculativeConfig:
        """Parse vLLM's flat form: every key that is no field of this class is an option of the method.

        A tree is ``speculative_token_tree`` (its nodes, in vLLM's form), or ``topk`` and ``num_draft_tokens``: the
        likeliest ``num_draft_tokens`` nodes with at most ``topk`` children each, by the prior of
        ``draft_tree.promising``.
        """
        if not isinstance(config.get("method"), str):
            if "num_speculative_tokens" in config:
                SpeculativeConfig(num_speculative_tokens=config["num_speculative_tokens"])  # checks the range
            settings = ", ".join(f"{name}={value!r}" for name, value in config.items())
            raise ConfigError(
                f'{settings or "the speculative config"}: choose a drafter with --speculative-method or "method" '
                "of the speculative config (mtp for the MTP modules of the checkpoint; --help lists all)."
            )
        known = {name: config[name] for name in _FLAT_KEYS if name in config}
        nodes = _asked_tree(config)
        if nodes:
            known["token_tree"] = nodes
            known.setdefault("num_speculative_tokens", min(len(nodes[-1]), MAX_DRAFTS))
        options = {k: v for k, v in config.items() if k not in known and k not in _TREE_KEYS}
        return SpeculativeConfig(**known, options=options)


_FLAT_KEYS = ("method", "model", "num_speculative_tokens", "adaptive", "draft_tensor_parallel_size", "share_drafts")
_TREE_KEYS = ("speculative_token_tree", "topk", "num_draft_tokens")


def _asked_tree(config: Mapping[str, Any]) -> tuple[Node, ...]:
    """The nodes of the tree in a flat speculative config; empty for a chain."""
    explicit, topk, budget = (config.get(name) for name in _TREE_KEYS)
    if explicit is not None:
        if topk is not None or budget is not None:
            raise ConfigError("speculative_token_tree names every node: leave out topk and num_draft_tokens.")
        return _tree("speculative_token_tree", parse_nodes, explicit)
    if topk is None and budget is None:
        return ()
    for name, value in (("topk", topk), ("num_draft_tokens", budget)):
        if not (isinstance(value, int) and is_int(value) and value >= 1):
            raise ConfigError(f"{name}={value!r}: topk and num_draft_tokens go together, whole numbers from 1 on.")
    k = config.get("num_speculative_tokens", SpeculativeConfig.num_speculative_tokens)
    SpeculativeConfig(num_speculative_tokens=k)  # checks the range of k
    return _tree(f"topk={topk} with num_draft_tokens={budget}", promising, topk, budget, k)


def _tree(what: str, make: Callable[..., tuple[Node, ...]], *config: Any) -> tuple[Node, ...]:
    try:
        return make(*config)
    except ValueError as error:
        raise ConfigError(f"{what}: {error}.") from None
