"""What may be captured of the engine's passes: modes, sizes, expected counts, memory.

Called by the runner at start; the planner measures, chooses and captures.
"""

from __future__ import annotations

from collections.abc import Iterable

from unisono.attention.base import AttentionBackend
from unisono.config import ResolvedConfig, parse_graphs
from unisono.graphs.cost import PassCost, candidates
from unisono.graphs.planner import Buckets
from unisono.kernels.linear import ROW_TILES
from unisono.program import Graph, Needs, Program, Shape
from unisono.types import ConfigError

GPU_PASSES = {"round": 500_000, "extend": 100_000, "score": 1_000, "draft": 5_000, "verify": 5_000}
"""Passes to expect of an engine, against which start-up time and memory for graphs are weighed."""

CPU_PASSES = {"round": 5_000, "extend": 200, "score": 1, "draft": 20, "verify": 20}

MASKED_SHARE = 0.01
"""Of prompt passes, how many sample under masks. So few that a start captures few sizes; others follow when idle. On a
CPU all of them wait for the first pass that wants one: captures are half of a start there."""

ROUNDS = {"round": "round", "draft": "round", "verify": "round"}
"""Programs whose rows are requests, and whose ``--graphs`` mode they have."""

CPU_COST = PassCost(fixed_ms=15.0, row_ms=0.4, capture_ms=20.0)
"""On a CPU nothing overlaps and a replay saves nothing: the tape is there for its semantics, so every pass replays one.
These are the bundled model's figures on one core; sizes chosen by a clock would differ from run to run."""

CPU_GRAPH_BYTES = 2 << 30
GPU_GRAPH_BYTES, GPU_GRAPH_SHARE = 2 << 30, 0.1
"""At most so many bytes for graphs on a GPU, and at most this share of what is free before the KV cache is sized."""

SHARES = {"round": 1.0, "extend": 0.8, "score": 0.5, "draft": 0.2, "verify": 0.3}
"""Of the memory for graphs, how much one program's may take: prompts leave some for rounds, which may take all."""

LEAST_TOKENS = 16
"""Tokens of the smallest prompt pass that is captured for itself."""

TILES = (*ROW_TILES, 128, 256, 512, 1024)
"""Tokens at which a product's tile is just full on a GPU."""


def tile_edges(width: int, limit: int) -> frozenset[int]:
    """Rows of ``width`` tokens, up to ``limit`` of them, behind which a larger tile or one tile more begins."""
    return frozenset(tile // width for tile in TILES if 1 <= tile // width <= limit)


def graph_modes(config: ResolvedConfig, attention: AttentionBackend) -> ResolvedConfig:
    """Settle ``--graphs auto``. Raises ConfigError where full graphs were asked of a backend that none can hold."""
    modes = dict(config.graphs)
    name = config.attention_backend
    for program, mode in modes.items():
        if mode == "full" and not attention.capturable:
            raise ConfigError(
                f"--graphs {config.asked.graphs} wants {program} passes captured whole, but attention backend {name!r} "
                f"plans on the host: use --graphs auto or {program}=segmented, or --attention-backend triton."
            )
    kind, why = ("full", "can be captured") if attention.capturable else ("segmented", "runs between segments")
    automatic = [program for program, mode in modes.items() if mode == "auto"]
    if not automatic:
        return config
    modes |= dict.fromkeys(automatic, kind)
    return config.decide(
        "graphs", f"{kind} for {', '.join(automatic)}", f"attention backend {name!r} {why}", graphs=modes
    )


def check_full(config: ResolvedConfig, graphs: Iterable[Graph]) -> None:
    """Raises ConfigError where ``--graphs full`` was asked of passes that turned out to break."""
    asked = parse_graphs(config.asked.graphs)
    for graph in graphs:
        program = ROUNDS.get(graph.key.program, graph.key.program)
        if graph.breaks and asked[program] == "full":
            raise ConfigError(
                f"--graphs {config.asked.graphs}: {graph.key.program} passes run {graph.breaks} functions eagerly, "
                f"so they cannot be captured whole. Use --graphs auto or {program}=segmented."
            )


def with_graph_bytes(config: ResolvedConfig, default: int, why: str) -> ResolvedConfig:
    """Settle ``--graph-memory``: what was asked for, else ``default`` bytes for this reason."""
    asked = config.asked.graph_memory
    if asked is None:
        return config.decide("graph_memory", f"{default / (1 << 30):.2f} GiB", why, graph_bytes=default)
    return config.decide("graph_memory", f"{asked} GiB", "as asked", graph_bytes=int(asked * (1 << 30)))


def gpu_graph_bytes(config: ResolvedConfig, free: int) -> ResolvedConfig:
    """:func:`with_graph_bytes` on a GPU with ``free`` bytes left for graphs and the KV cache."""
    if set(config.graphs.values()) == {"off"}:
        return config
    default = max(0, min(GPU_GRAPH_BYTES, int(GPU_GRAPH_SHARE * free)))
    config = with_graph_bytes(config, default, f"{GPU_GRAPH_SHARE:.0%} of {free >> 20} MiB free, 2 GiB at most")
    if config.graph_bytes > free:
        raise ConfigError(
            f"--graph-memory {config.asked.graph_memory}: {max(0, free) / (1 << 30):.2f} GiB are free for graphs "
            "and the KV cache together. Lower it, or raise --gpu-memory-utilization."
        )
    return config


def buckets_of(program: Program, config: ResolvedConfig, width: int, needs: Needs) -> Buckets:
    """What may be captured of one of the engine's programs."""
    name, gpu = program.name, config.device.type == "cuda"
    each, limit, least = (
        (width, config.max_num_seqs, 1) if name in ROUNDS else (1, config.max_num_batched_tokens, LEAST_TOKENS)
    )
    edges = tile_edges(each, limit) if gpu and name in ("round", "extend") and not needs.masks else frozenset()
    passes = (GPU_PASSES if gpu else CPU_PASSES)[name]
    shapes = tuple(Shape(rows, each) for rows in sorted({*candidates(limit, least), *edges}))
    return Buckets(
        program,
        shapes,
        needs,
        mode=config.graphs[ROUNDS.get(name, name)],
        passes=passes * MASKED_SHARE if needs.masks and name not in ROUNDS else passes,
        edges=edges,
        cost=None if gpu else CPU_COST,
        measured=gpu,
        on_demand=not gpu and (needs.masks or name == "draft"),
        always=name in ROUNDS or config.asked.graphs != "auto",
        share=SHARES[name],
    )
