"""Capture candidates of the engine's passes: modes, sizes, expected counts, memory.

Called by the build and the runner at start. The planner measures, chooses and captures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from unisono.attention.base import AttentionBackend
from unisono.config import GRAPH_PROGRAMS, ResolvedConfig, parse_graphs
from unisono.drafters.base import AtOnceDrafter, Drafter, RaggedDrafter
from unisono.engine.scheduling.forced_drafts import forced_rows
from unisono.graphs import NO_FEATURES, Features, Graph, Logits, PassShape, Program
from unisono.graphs.buckets import Buckets
from unisono.graphs.cost import PassCost, candidates
from unisono.kernels.gemm.linear import ROW_TILES
from unisono.kv.specs import PAGE_SIZE
from unisono.passes.features.base import OwnProgram
from unisono.passes.round import SHARED_ROUND, shared_round
from unisono.types import ConfigError

GPU_PASSES = {
    "round": 10_000, "extend": 2_000, "mixed": 2_000, "score": 20, "catch_up": 20, "draft": 2_000, "verify": 2_000,
}  # fmt: skip
"""Expected number of passes in an engine's life, weighed against start-up time and graph memory."""

CPU_PASSES = {"round": 5_000, "extend": 200, "mixed": 20, "score": 1, "catch_up": 1, "draft": 20, "verify": 20}

DECODE_SIZES = (32, 128)
"""Decode capacities of mixed passes: graphs have room for one of these numbers of requests, or for all that can run."""

MASKED_SHARE = 0.01
"""Fraction of prompt passes that sample under masks. Their graphs, and those of masked rounds, are captured before the
first pass that needs them, not at start.
"""

DECODE_PROMPTS = 0.1
"""Fraction of the usual prompt passes that a decode engine is expected to run."""

ROUNDS = ("round", "draft", "verify", "catch_up")
"""Programs whose rows are requests. The mode of ``round`` in ``--graphs`` applies to all of them."""

CPU_COST = PassCost.linear(fixed_ms=15.0, row_ms=0.4, capture_ms=20.0)
"""Fixed costs on a CPU, measured with the bundled model. Every pass replays a tape there: replay saves no time, and
measured costs would choose other sizes in every run.
"""


SHARES = {"round": 1.0, "extend": 0.8, "mixed": 0.5, "score": 0.5, "catch_up": 0.2, "draft": 0.2, "verify": 0.3}
"""Fraction of graph memory that one program may take. Prompt passes leave some for rounds."""

CHAIN_DRAFTS = (0, 1, 2, 3, 5, 7, 11)
"""Numbers of drafts below k for which rounds of a chain are captured. With 1, 3 and 7 the tokens of 2^n requests fill
the tiles of products.
"""

MAX_UNOBSERVED = 32
"""Tokens per request that a paused drafter may lag, if each of them costs memory."""

KEPT_SHARES = (0.45, 0.85)
"""Range of prompt-pass times under load, as fractions of ``--max-stall-ms`` on padding. All sizes in it have graphs.
The lower end: each token attends to some 15,000 keys.
"""

COMMON_TOKENS = frozenset({2048})
"""Prompt passes of these sizes have their own graph on a GPU: chunks and benchmarks use them, and above 1,024 tokens
the profitable sizes lie a third apart.
"""

LEAST_TOKENS = 16
"""Tokens of the smallest prompt pass with a graph of its own size."""

TILES = (*ROW_TILES, 128, 256, 512, 1024)
"""Row counts that fill the tile of a GEMM exactly, on a GPU."""


def draft_choices(config: ResolvedConfig, most: int) -> tuple[tuple[int, ...], str]:
    """Return the numbers of drafts that a round may have, ascending, and the reason. most: the drafter's k."""
    spec = config.speculative
    if not most or spec is None:
        return (most,), "nothing drafts"
    if not spec.adaptive:
        return (most,), "adaptive is off"
    if config.requested.synthetic_acceptance_length is not None:
        return (most,), "a mean acceptance length is synthetic"
    if config.graphs["round"] == "off":
        return (most,), "without graphs nothing is known of what rounds cost"
    # another depth of a tree would be another tree
    choices = (0, most) if spec.paths else (*(k for k in CHAIN_DRAFTS if k < most), most)
    return choices, "each round what brings most tokens a second, as costs and acceptance go"


def shared_choices(
    config: ResolvedConfig, drafter: Drafter, choices: Sequence[int], recurrent: bool
) -> tuple[tuple[int, ...], str]:
    """Return the numbers of drafts that requests share in a round, and the reason. recurrent: the target's state is.

    A round of any of ``choices`` but the fewest and the most shares its drafts.
    """
    spec, between = config.speculative, tuple(choices[1:-1])
    if spec is None or not between:
        return (), "the number of drafts has no choices in between"
    if recurrent and choices[-1] >= PAGE_SIZE:
        return (), f"recurrent layers remember {PAGE_SIZE} tokens of a row of its own width"
    constant = isinstance(drafter, AtOnceDrafter) and drafter.drafts_at_once
    if spec.share_drafts is None and not constant:
        return (), f"each draft costs {drafter.name} a pass, so all requests have the same number"
    if spec.share_drafts is False:
        return (), "share_drafts is off"
    ragged = isinstance(drafter, RaggedDrafter) and drafter.drafts_ragged
    if spec.share_drafts is None and config.device.type != "cpu":
        way_out = "share_drafts turns it on"
        if not ragged:
            return (), f"on GPUs by default only where verified places alone are drafted; {way_out}"
        if recurrent:
            return (), f"on GPUs not by default with recurrent layers, whose rounds have not been timed; {way_out}"
        return between, "only what is verified is drafted, which was faster where requests differ"
    if spec.share_drafts:
        return between, "share_drafts is on"
    return between, "drafting costs the same for any number"


def max_unobserved_tokens(config: ResolvedConfig) -> int:
    """Tokens per request of a drafter's catch-up pass: as many as fit in a prompt pass."""
    fit = max(4, config.max_num_batched_tokens // config.max_num_seqs)
    return min(MAX_UNOBSERVED, 1 << (fit.bit_length() - 1))


def tile_edges(width: int, limit: int) -> frozenset[int]:
    """Return numbers of rows of ``width`` tokens, up to ``limit``, that fill a tile exactly."""
    return frozenset(tile // width for tile in TILES if 1 <= tile // width <= limit)


def graph_modes(config: ResolvedConfig, attention: AttentionBackend) -> ResolvedConfig:
    """Resolve ``--graphs auto``. Raises ConfigError for full graphs with a backend that cannot be captured."""
    modes = dict(config.graphs)
    name = config.attention_backend
    for program, mode in modes.items():
        if mode == "full" and not attention.capturable:
            raise ConfigError(
                f"--graphs {config.requested.graphs}: {program} passes cannot be captured whole: attention backend "
                f"{name!r} plans on the host: use --graphs auto or {program}=segmented, or --attention-backend triton."
            )
    if config.requested.role == "prefill" and modes["round"] == "auto":
        modes["round"] = "off"
        config = config.decide("graphs of rounds", "none", "--role prefill: other engines run them", graphs=modes)
    kind, why = ("full", "can be captured") if attention.capturable else ("segmented", "runs between segments")
    automatic = [program for program, mode in modes.items() if mode == "auto"]
    if not automatic:
        return config
    modes |= dict.fromkeys(automatic, kind)
    return config.decide(
        "graphs", f"{kind} for {', '.join(automatic)}", f"attention backend {name!r} {why}", graphs=modes
    )


def mode_program(program: str) -> str:
    """Return the program whose mode in ``--graphs`` applies to this one; pre-passes use the mode of prompts."""
    return "round" if is_round(program) else program if program in GRAPH_PROGRAMS else "extend"


def is_round(program: str) -> bool:
    """Return True for a program whose rows are requests."""
    return usual_name(program) in ROUNDS


def usual_name(program: str) -> str:
    """Return the name under which constants for this program are listed."""
    return "round" if program.startswith(SHARED_ROUND) else program


def check_full(config: ResolvedConfig, graphs: Iterable[Graph]) -> None:
    """Raises ConfigError if ``--graphs full`` is set and a captured pass has eager breaks."""
    modes = parse_graphs(config.requested.graphs)
    for graph in graphs:
        program = mode_program(graph.key.program)
        if graph.breaks and modes[program] == "full":
            raise ConfigError(
                f"--graphs {config.requested.graphs}: {graph.key.program} passes run {graph.breaks} functions eagerly, "
                f"so they cannot be captured whole. Use --graphs auto or {program}=segmented."
            )


def engine_buckets(
    programs: Mapping[str, Program],
    config: ResolvedConfig,
    choices: Sequence[int],
    features: Features,
    max_unobserved: int,
    expected: Sequence[Features] = (),
    expected_rounds: Sequence[Features] = (),
    whole: Features = NO_FEATURES,
) -> list[Buckets]:
    """Return the capture candidates of every program.

    features: the drafter's. choices: numbers of drafts of a round. expected: further features of many prompt passes;
    expected_rounds: of many rounds. whole: features of passes that read whole rows of logits, if these are gathered.
    Then every graph has them, because such graphs serve all passes, and some are captured without them besides
    (:func:`part_buckets`).
    """
    of_parts = part_buckets(programs, config, choices, features) if whole != NO_FEATURES else []
    features = features | whole
    masked = replace(features, masks=True)
    buckets = round_buckets(programs, config, choices, features)
    for variant in (features, masked):
        buckets.append(buckets_of(programs["extend"], config, 1, variant))
        buckets.append(score_buckets(programs["score"], config, replace(variant, logits=Logits.ALL)))
    for more in expected:
        usual = buckets_of(programs["extend"], config, 1, features | more)
        buckets.append(replace(usual, on_demand=config.device.type == "cpu"))
    for more in expected_rounds:
        usual_rounds = round_buckets(programs, config, choices, features | more)
        buckets += [replace(each, on_demand=config.device.type == "cpu") for each in usual_rounds]
    for drafts in sorted({choices[0], choices[-1], *config.forced_drafts}):
        for more in (masked, *(masked | more for more in expected_rounds)):
            verify = buckets_of(programs["verify"], config, 1 + drafts, more)
            buckets.append(verify if drafts in choices else _up_to(verify, forced_rows(drafts)))
    if "draft" in programs:
        buckets.append(buckets_of(programs["draft"], config, 1 + choices[-1], features))
    if "mixed" in programs:
        buckets += mixed_buckets(programs["mixed"], config, decode_sizes(config), features)
    if "catch_up" in programs:
        buckets.append(catch_up_buckets(programs["catch_up"], config, max_unobserved))
    return [*buckets, *of_parts]


def captured_lazily(buckets: Buckets, config: ResolvedConfig) -> Buckets:
    """Adapt buckets to ``graph_capture="lazy"``: no graph at start or while idle, and no measured costs.

    On a GPU the sizes lie a factor of two apart: fewer captures matter more than padding.
    """
    lazy = replace(
        buckets,
        on_demand=True,
        measured=False,
        deferred=False,
        cost_like=None,
        kept_ms=(0.0, 0.0),
        when_idle=frozenset(),
    )
    if config.device.type != "cuda":
        return lazy
    shapes: list[PassShape] = []
    for shape in buckets.shapes:
        if not shapes or shape.rows >= 2 * shapes[-1].rows or shape is buckets.shapes[-1]:
            shapes.append(shape)
    return replace(lazy, shapes=tuple(shapes))


def part_buckets(
    programs: Mapping[str, Program], config: ResolvedConfig, choices: Sequence[int], features: Features
) -> list[Buckets]:
    """Return the buckets of passes without whole rows of logits, which a graph for whole rows would serve, too.

    On a GPU: rounds without drafts and with all of them, which are nearly all rounds; a prompt pass would gain 1 % at
    most. On a CPU also prompt passes, each size for the first pass that needs it, so that tests have both kinds.
    """
    cpu = config.device.type == "cpu"
    rounds = round_buckets(programs, config, choices, features)
    found = [rounds[0], rounds[-1]] if len(rounds) > 1 else rounds
    if cpu:
        found.append(buckets_of(programs["extend"], config, 1, features))
    return [replace(b, spare=True, on_demand=cpu) for b in found]


def decode_sizes(config: ResolvedConfig) -> tuple[int, ...]:
    """Decode capacities of mixed-pass graphs, ascending. Empty if mixed passes are disabled."""
    spec = config.speculative
    always_drafts = spec is not None and spec.method != "none" and not spec.adaptive
    if not config.enable_mixed_chunk or config.requested.role == "prefill" or always_drafts:
        return ()
    most = min(config.max_num_seqs, config.max_num_batched_tokens // 2)
    return (*(size for size in DECODE_SIZES if size < most), most)


def mixed_buckets(
    program: Program, config: ResolvedConfig, sizes: Sequence[int], features: Features
) -> Iterator[Buckets]:
    """Return the buckets of mixed passes for each decode capacity.

    A pass costs as much as a prompt pass of as many tokens. On a GPU its graphs are captured while the engine is idle,
    for each capacity as many as prompt passes have: a mixed pass with more padding than a prompt pass does not pay.
    """
    gpu = config.device.type == "cuda"
    for size in sizes:
        tokens = candidates(config.max_num_batched_tokens - size, LEAST_TOKENS)
        yield Buckets(
            program,
            tuple(PassShape(size + each, 1 + size) for each in tokens),
            features,
            mode=config.graphs[mode_program(program.name)],
            passes=GPU_PASSES["mixed"] if gpu else CPU_PASSES["mixed"] / len(sizes),
            cost=None if gpu else CPU_COST,
            cost_like=("extend", 1) if gpu else None,
            on_demand=not gpu,
            deferred=gpu,
            kept_ms=_kept_ms(config),
            always=config.requested.graphs != "auto",
            share=SHARES["mixed"],
        )


def _kept_ms(config: ResolvedConfig) -> tuple[float, float]:
    """Range of times, in milliseconds, of prompt passes that running requests wait for on a GPU; empty on a CPU."""
    if config.device.type != "cuda":
        return 0.0, 0.0
    least, most = KEPT_SHARES
    return least * config.requested.max_stall_ms, most * config.requested.max_stall_ms


def score_buckets(program: Program, config: ResolvedConfig, features: Features) -> Buckets:
    """Return the buckets of prompt passes that compute all logits.

    Few requests need them, so they are captured while a GPU engine is idle, not at start. A pass costs as much as a
    prompt pass, without the LM head for its other tokens.
    """
    buckets = buckets_of(program, config, 1, features)
    if not buckets.measured:
        return buckets
    return replace(buckets, measured=False, deferred=True, cost_like=("extend", 1))


def own_buckets(own: OwnProgram, config: ResolvedConfig) -> Buckets:
    """Return the buckets of a feature's own program. On a CPU its graphs are captured when passes need them."""
    gpu = config.device.type == "cuda"
    return Buckets(
        own.program,
        tuple(PassShape(own.multiple * n) for n in candidates(own.most // own.multiple, own.least // own.multiple)),
        mode=config.graphs[mode_program(own.program.name)],
        passes=own.passes * (GPU_PASSES if gpu else CPU_PASSES)["extend"],
        cost=None if gpu else PassCost.linear(fixed_ms=15.0, row_ms=own.ms, capture_ms=20.0),
        measured=gpu,
        on_demand=not gpu,
        always=config.requested.graphs != "auto",
        share=own.share,
    )


def round_buckets(
    programs: Mapping[str, Program], config: ResolvedConfig, choices: Sequence[int], features: Features
) -> list[Buckets]:
    """Return the buckets of rounds for each number of drafts. Numbers between the extremes have few sizes, all
    captured.
    """
    if len(choices) == 1:
        return [buckets_of(programs["round"], config, 1 + choices[0], features)]
    buckets = []
    for k in choices:
        shared = programs.get(shared_round(k))
        program, width = (programs["round"], 1 + k) if shared is None else (shared, 1 + choices[-1])
        buckets.append(buckets_of(program, config, width, features, part=0.5))
    for i in range(1, len(choices) - 1):  # all of their sizes are captured, so no cost is measured
        buckets[i] = replace(_sparse(buckets[i], config.max_num_seqs), passes=None, measured=False)
    return buckets


def catch_up_buckets(program: Program, config: ResolvedConfig, width: int) -> Buckets:
    """Return the buckets of passes in which a paused drafter catches up with ``width`` tokens per request."""
    gpu = config.device.type == "cuda"
    shapes = tuple(PassShape(rows, width) for rows in candidates(config.max_num_seqs))
    buckets = Buckets(
        program,
        shapes,
        mode=config.graphs[mode_program(program.name)],
        passes=GPU_PASSES["catch_up"] if gpu else None,
        measured=gpu,
        share=SHARES["catch_up"],
    )
    return _sparse(buckets, config.max_num_seqs)


def _up_to(buckets: Buckets, rows: int) -> Buckets:
    """Keep the shapes up to the first one that holds ``rows`` rows."""
    least = min((shape.rows for shape in buckets.shapes if shape.rows >= rows), default=rows)
    return replace(buckets, shapes=tuple(shape for shape in buckets.shapes if shape.rows <= least))


def _sparse(buckets: Buckets, limit: int) -> Buckets:
    """Keep the shapes of 1, 4 and 16 · 2^n rows up to ``limit``, and the largest."""
    shapes = [shape for shape in buckets.shapes if shape.rows <= limit]
    chosen = tuple(s for s in shapes if s.rows in (1, 4) or s.rows & (15 | s.rows - 1) == 0 or s is shapes[-1])
    return replace(buckets, shapes=chosen, edges=frozenset())


def buckets_of(program: Program, config: ResolvedConfig, width: int, features: Features, part: float = 1.0) -> Buckets:
    """Return the buckets of one program. part: fraction of its expected passes with this width."""
    name, gpu = usual_name(program.name), config.device.type == "cuda"
    each, limit, least = (
        (width, config.max_num_seqs, 1) if name in ROUNDS else (1, config.max_num_batched_tokens, LEAST_TOKENS)
    )
    on_demand = features.masks or name == "draft"
    edges = tile_edges(each, limit) if gpu and name in ("round", "extend") and not on_demand else frozenset()
    usual_prompts = gpu and name == "extend" and not on_demand
    passes = part * (GPU_PASSES if gpu else CPU_PASSES)[name]
    if config.requested.role == "decode" and name not in ROUNDS:
        passes *= DECODE_PROMPTS
    shapes = tuple(PassShape(rows, each) for rows in sorted({*candidates(limit, least), *edges}))
    buckets = Buckets(
        program,
        shapes,
        features,
        mode=config.graphs[mode_program(name)],
        passes=passes * (MASKED_SHARE if features.masks and name not in ROUNDS else 1.0),
        edges=edges,
        flat=ROW_TILES[-1] // each if gpu else 0,
        cost=None if gpu else CPU_COST,
        measured=gpu and not on_demand,
        on_demand=on_demand,
        kept_ms=_kept_ms(config) if usual_prompts else (0.0, 0.0),
        when_idle=frozenset({limit}) if usual_prompts else frozenset(),
        common=COMMON_TOKENS if usual_prompts else frozenset(),
        always=name in ROUNDS or config.requested.graphs != "auto",
        share=SHARES[name],
    )
    # graphs captured on demand are not measured
    return _sparse(buckets, limit if name in ROUNDS else TILES[-1]) if gpu and on_demand else buckets
