"""Reports of an engine: ``info`` for ``/server_info`` and ``explain``, ``metrics`` for ``/metrics``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Protocol

import numpy as np

from unisono.config import ResolvedConfig
from unisono.engine import offload
from unisono.engine.disaggregation import roles
from unisono.engine.disaggregation.roles import Roles
from unisono.engine.failures import STAGES, Failures
from unisono.engine.scheduling.arrivals import Arrivals
from unisono.engine.scheduling.draft_controller import DraftController
from unisono.engine.scheduling.scheduler import Scheduler
from unisono.engine.startup.capture_candidates import usual_name
from unisono.engine.worker.runner import Runner
from unisono.kv.pages import PagePool
from unisono.kv.specs import ALL, PAGE_SIZE
from unisono.layers.experts import expert_counts
from unisono.models.load.checkpoint import Checkpoint
from unisono.passes.features.base import Metric


@dataclass
class Counters:
    """Counters of results.

    ``draft_rounds`` counts one per request and round that may have drafts, ``drafts`` those that had some: a drafter
    may find nothing to propose. ``accepted_per_position[i]``: accepted drafts at position i. ``rounds_per_position[i]``
    and ``drafts_per_position[i]``: the same counts for rounds with room for more than i drafts, since k may differ from
    round to round.
    """

    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    draft_rounds: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    rounds_per_position: list[int] = field(default_factory=list)
    drafts_per_position: list[int] = field(default_factory=list)
    forced_tokens: int = 0
    accepted_forced_tokens: int = 0

    @classmethod
    def of(cls, num_drafts: int) -> Counters:
        """Return zeros for a drafter that proposes up to ``num_drafts`` tokens a round."""
        accepted, rounds, drafts = ([0] * num_drafts for _ in range(3))
        return cls(accepted_per_position=accepted, rounds_per_position=rounds, drafts_per_position=drafts)

    def count_round(
        self, drafts: int, drafted: np.ndarray, accepted: np.ndarray, found: np.ndarray | None = None
    ) -> None:
        """Count a round of up to ``drafts`` drafts. drafted, accepted [requests]: drafts of each request, and accepted
        ones. found [requests]: drafts of each before a common budget left some out; None: it had no such budget.
        """
        requests, drafting = len(drafted), int(np.count_nonzero(drafted))
        self.draft_rounds += requests
        self.drafts += drafting
        self.drafted_tokens += int(drafted.sum())
        self.accepted_tokens += int(accepted.sum())
        longer = np.bincount(accepted, minlength=drafts + 1)[::-1].cumsum()[::-1]  # requests that accepted i or more
        rooms, drafting_rooms = [requests] * drafts, [drafting] * drafts
        if found is not None:
            room = np.where(drafted < found, drafted, drafts)
            rooms, drafting_rooms = (
                (some[:, None] > np.arange(drafts)).sum(0).tolist() for some in (room, room[drafted > 0])
            )
        for place in range(drafts):
            self.rounds_per_position[place] += rooms[place]
            self.drafts_per_position[place] += drafting_rooms[place]
            self.accepted_per_position[place] += int(longer[place + 1])

    def count_forced(self, forced: np.ndarray, accepted: np.ndarray) -> None:
        """Count a round with forced drafts. forced, accepted [requests]: forced drafts, and accepted drafts of any
        kind.
        """
        self.forced_tokens += int(forced.sum())
        self.accepted_forced_tokens += int(np.minimum(forced, accepted).sum())

    @property
    def accept_length(self) -> float:
        """Mean tokens that a drafting request commits per round, including the bonus token."""
        return 1 + self.accepted_tokens / max(1, self.draft_rounds)

    @property
    def accepted_share_per_position(self) -> tuple[float, ...]:
        """Acceptance rate by draft position, over the rounds counted in :attr:`accept_length`."""
        pairs = zip(self.accepted_per_position, self.rounds_per_position, strict=True)
        return tuple(accepted / max(1, rounds) for accepted, rounds in pairs)

    @property
    def acceptance_per_position(self) -> list[float]:
        """Acceptance rate by draft position, over the rounds with drafts."""
        pairs = zip(self.accepted_per_position, self.drafts_per_position, strict=True)
        return [accepted / max(1, drafts) for accepted, drafts in pairs]


class Reported(Protocol):
    """Engine interface that reports read."""

    runner: Runner
    scheduler: Scheduler
    failures: Failures
    draft_controller: DraftController
    pool: PagePool
    arrivals: Arrivals
    roles: Roles
    checkpoint: Checkpoint
    counters: Counters
    start_seconds: float
    weight_version: str

    @property
    def config(self) -> ResolvedConfig: ...
    def generation_defaults(self) -> dict[str, float]: ...


def info(engine: Reported) -> dict[str, object]:
    """See :meth:`unisono.engine.engine.Engine.info`."""
    runner, scheduler, config = engine.runner, engine.scheduler, engine.checkpoint.config
    worker = runner.worker
    spec = engine.config.speculative
    speculation = {
        "drafter": worker.drafter.name,
        "num_speculative_tokens": runner.width - 1,
        "max_forced_tokens": max(engine.config.forced_drafts, default=0),
        "paths": runner.paths,
        "tree_nodes": len(spec.token_tree) if spec is not None else 0,
        "adaptive": len(runner.choices) > 1,
        "rounds_by_drafts": {str(k): count for k, count in sorted(engine.draft_controller.rounds.items())},
        "round_ms": round_costs(engine),
    }
    tokens = expert_counts(worker.model)
    acceptance = [round(share, 4) for share in engine.counters.acceptance_per_position]
    return {
        **engine.config.explain(),
        "weight_version": engine.weight_version,
        "architecture": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "eos_token_ids": list(engine.checkpoint.eos_token_ids),
        "generation_defaults": engine.generation_defaults(),
        "kv_cache": {
            "dtype": str(engine.config.kv_dtype).removeprefix("torch."),
            "token_bytes": worker.store.token_bytes("target"),
            "page_size": PAGE_SIZE,
            "pages": worker.num_pages[ALL],
            "window_pages": {str(w): n for w, n in worker.num_pages.items() if w != ALL},
            "snapshots": worker.snapshots,
            "path_pages": worker.path_pages,
            "bytes": worker.store.nbytes("target"),
            "drafter_bytes": worker.store.nbytes("drafter"),
            "usage": round(engine.pool.usage, 4),
            "cached_pages": engine.pool.cached_pages,
        },
        "kv_offload": offload.info(engine.pool.offload, worker.host_pages),
        "kv_transfer": roles.info(engine.roles),
        "graphs": runner.planner.report(),
        "graph_memory": runner.planner.costs(),
        "passes": [
            {"program": program, "kind": kind, "reason": reason, "count": count}
            for (program, kind, reason), count in sorted(runner.planner.passes.items())
        ],
        "mixing": scheduler.mixing.info() if scheduler.mixing is not None else {},
        "speculation": {
            **speculation,
            "avg_spec_accept_length": round(engine.counters.accept_length, 4),
            "acceptance_per_position": acceptance[: runner.width - 1],
        },
        "counters": asdict(engine.counters),
        "experts": expert_load(tokens),
        "expert_tokens": tokens,
        "start_seconds": {**runner.seconds, "total": round(engine.start_seconds, 3)},
        "requests": {"running": len(scheduler.active), "waiting": len(scheduler.waiting) + len(engine.arrivals)},
        **{name: value for feature in runner.request_features for name, value in feature.info().items()},
    }


def expert_load(tokens: Mapping[str, list[int]]) -> list[dict[str, object]]:
    """Return the load balance of each layer's experts since the start: the busiest's tokens over the mean, and idle
    ones. tokens: of each expert.
    """
    return [
        {
            "layer": path.removesuffix(".feed_forward"),
            "choices": sum(counts),
            "max / mean": round(max(counts) * len(counts) / sum(counts), 2),
            "idle": counts.count(0),
        }
        for path, counts in tokens.items()
        if any(counts)
    ]


def round_costs(engine: Reported) -> list[dict[str, object]]:
    """Return the time of rounds on padding by requests and drafts, the input of the choice of k. Empty if k is
    fixed.
    """
    choices, planner = engine.runner.choices, engine.runner.planner
    if len(choices) == 1:
        return []
    rows = sorted({graph.key.shape.rows for graph in planner.graphs() if usual_name(graph.key.program) == "round"})
    table = [{k: engine.draft_controller.padding_ms(count, k) for k in choices} for count in rows]
    return [
        {"requests": count, **{f"k={k}": "" if ms is None else round(ms, 3) for k, ms in costs.items()}}
        for count, costs in zip(rows, table, strict=True)
    ]


def metrics(engine: Reported) -> list[Metric]:
    """See :meth:`unisono.engine.engine.Engine.metrics`. Names are vLLM's where it has them."""
    s, planner, c = engine.scheduler, engine.runner.planner, engine.counters
    gauges = [
        ("num_requests_running", len(s.active), "Requests that hold a slot."),
        ("num_requests_waiting", len(s.waiting) + len(engine.arrivals), "Requests in the queue."),
        ("kv_cache_usage_perc", engine.pool.usage, "Share of KV pages held by requests, 0 to 1."),
    ]
    counters = [
        ("prefix_cache_queries", s.prefix_queries, "Prompt tokens looked up in the prefix cache."),
        ("prefix_cache_hits", s.prefix_hits, "Prompt tokens found in the prefix cache."),
        ("prompt_tokens_cached", s.prefix_hits, "Prompt tokens found in the prefix cache."),
        ("num_preemptions", s.preemptions, "Preempted requests."),
        ("prompt_tokens", c.prompt_tokens, "Prompt tokens processed."),
        ("generation_tokens", c.generation_tokens, "Tokens generated."),
        ("spec_decode_num_drafts", c.drafts, "Drafts: one per request and round with draft tokens."),
        ("spec_decode_num_draft_tokens", c.drafted_tokens, "Draft tokens."),
        ("spec_decode_num_accepted_tokens", c.accepted_tokens, "Accepted draft tokens."),
        ("forced_tokens", c.forced_tokens, "Draft tokens that a grammar forced."),
        ("forced_tokens_accepted", c.accepted_forced_tokens, "Accepted forced draft tokens."),
    ]
    samples: list[Metric] = [(name, "gauge", {}, value, text) for name, value, text in gauges]
    samples += [(name, "counter", {}, value, text) for name, value, text in counters]
    text = "Requests that failed in the engine, by stage."
    samples += [("request_failures", "counter", {"stage": one}, engine.failures.counts[one], text) for one in STAGES]
    samples += offload.metrics(engine.pool.offload, engine.runner.worker.host_pages)
    samples += roles.metrics(engine.roles)
    drafts_anything = engine.runner.width > 1
    if drafts_anything:
        labels = {"drafter": engine.runner.worker.drafter.name, "num_speculative_tokens": str(engine.runner.width - 1)}
        samples.append(("spec_decode_drafter", "gauge", labels, 1, "Drafter of the engine, as a label; always 1."))
    for place, accepted in enumerate(c.accepted_per_position if drafts_anything else ()):
        name, text = "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens, by position."
        samples.append((name, "counter", {"position": str(place)}, accepted, text))
    for drafts, rounds in sorted(engine.draft_controller.rounds.items()):
        name, text = "spec_decode_num_rounds", "Rounds, by the largest number of draft tokens per request."
        if drafts_anything:
            samples.append((name, "counter", {"num_speculative_tokens": str(drafts)}, rounds, text))
    costs = planner.costs()
    graphs = [
        ("graphs", costs["graphs"], "Captured graphs."),
        ("graph_bytes", costs["bytes"], "Bytes of captured graphs."),
        ("graph_capture_seconds", costs["capture_seconds"], "Seconds of capturing, at the start and while idle."),
        ("graph_idle_captures", costs["idle_captures"], "Graphs captured after the start, while idle."),
    ]
    samples += [(name, "gauge", {}, value, text) for name, value, text in graphs]
    for program, rows in planner.filled_rows.items():
        labels, padded = {"program": program}, planner.padded_rows[program]
        share = padded / max(1, rows + padded)
        samples.append(("graph_padding_share", "gauge", labels, share, "Share of replayed rows that were padding."))
        samples.append(
            ("graph_rows_filled", "counter", labels, rows, "Rows (extend: tokens) of replayed graphs in use.")
        )
        samples.append(("graph_rows_padded", "counter", labels, padded, "Rows (extend: tokens) that were padding."))
    samples += [metric for feature in engine.runner.request_features for metric in feature.metrics()]
    for (program, kind, reason), count in sorted(planner.passes.items()):
        labels = {"program": program, "kind": kind, "reason": reason}
        samples.append(("passes", "counter", labels, count, "Forward passes by program, graph kind and eager reason."))
    return samples
