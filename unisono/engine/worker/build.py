"""Build of a worker from the resolved configuration: model, drafter, slots, caches and programs.

Every rank is built the same way. Rank 0 then plans and captures graphs through its worker
(``engine/worker/runner.py``).
"""

from __future__ import annotations

import functools
import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from unisono.attention.base import BreakingAttention
from unisono.config import ResolvedConfig, catalog
from unisono.config.preflight.families import ENCODERS, HEADLESS
from unisono.distributed.gather import ALONE, Ranks, described
from unisono.distributed.group import Alone, Group, agreement, decided
from unisono.drafters.base import DivisibleDrafter, Drafter, DrafterContext, PausableDrafter, TreeDrafter
from unisono.engine.offload import hold_host_pages, staging_bytes
from unisono.engine.scheduling.forced_drafts import MAX_VERIFIED, with_forced_drafts
from unisono.engine.sequence import RoundWidths
from unisono.engine.startup.capture_candidates import (
    captured_lazily,
    decode_sizes,
    draft_choices,
    engine_buckets,
    graph_modes,
    max_unobserved_tokens,
    own_buckets,
    shared_choices,
)
from unisono.engine.startup.compile_processes import CompileProcesses, forks_for
from unisono.engine.startup.drafter import make_drafter
from unisono.engine.startup.memory import PageDemand, fit_pages, peak_bytes
from unisono.engine.startup.packaged_kernels import installed_kernels
from unisono.engine.startup.start_notes import StartNotes
from unisono.engine.startup.synthetic import candidate_rule
from unisono.engine.startup.warmup import compiling_only, run_kinds_on_padding, warmup_passes
from unisono.engine.worker.device_state import StateSizes
from unisono.engine.worker.sleeping import SleepingMemory, modules_of
from unisono.engine.worker.slots import Slots, slot_schema
from unisono.engine.worker.weight_updates import WeightUpdater
from unisono.engine.worker.worker import Worker
from unisono.graphs import NO_FEATURES, Features, Hidden, PassShape, Program
from unisono.graphs.buckets import Buckets
from unisono.graphs.graph_set import GraphSet
from unisono.kernels.gemm.layer_tail_gluon import MOST_ROWS
from unisono.kernels.gemm.linear import TRITON_ROWS
from unisono.kernels.gemm.persistent import claimed_by
from unisono.kernels.overlap import overlaps
from unisono.kernels.proofs import agreeing
from unisono.kernels.sampling.column_keys import key_bytes
from unisono.kv.specs import ALL, PAGE_SIZE, has_recurrent_state
from unisono.kv.store import StateStore
from unisono.kv.window_pages import WindowPool
from unisono.layers.experts import prove_experts, rehearse_experts
from unisono.layers.linear import prove_linears, rehearse_proofs
from unisono.models.blocks.decoder import Decoder
from unisono.models.blocks.layer_tails import fuse_tails, rehearse_tails
from unisono.models.blocks.router_recorder import RouterRecorder
from unisono.models.load.checkpoint import Checkpoint
from unisono.models.load.loader import load_model, load_tower
from unisono.models.load.rank_report import rank_decisions
from unisono.models.lora.adapters import AdapterLimits, attach_adapters
from unisono.models.lora.host_adapters import HeldAdapters
from unisono.models.vision.tower import AnyTower
from unisono.passes.context import PassContext
from unisono.passes.extend import extend_program, mixed_program
from unisono.passes.features.base import Feature, FeatureContext, OwnProgram
from unisono.passes.round import catch_up_program, draft_program, round_program, shared_round_program, verify_program
from unisono.passes.slot_tensors import rotary_positions
from unisono.passes.tree import Tree, path_pages
from unisono.sampling.pipeline import DraftSampler, ReportedValues
from unisono.types import SpeculativeConfig

MAX_EXTEND_ROWS = 32
"""Largest number of requests in one prompt pass."""

Progress = Callable[[str, float], None]
"""Called with a stage's name and its completed fraction, 0 … 1."""


class Build:
    """Build ``worker``, stage by stage.

    ``config`` gains the decisions made on the way; ``seconds`` has the time of each stage. ``choices``: numbers of
    drafts of a round. ``max_unobserved``: tokens of one catch-up pass of a paused drafter; 0 if it is never paused.
    Raises ConfigError if the device's memory does not hold the model and one request.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        checkpoint: Checkpoint,
        progress: Progress,
        group: Group | None = None,
        notes: StartNotes | None = None,
    ) -> None:
        self.config, self.seconds, self._group = config, dict[str, float](), group or Alone()
        self._notes = notes or StartNotes()
        packaged = installed_kernels(config.device)
        with CompileProcesses(forks_for(config.device, self._group.ranks.count), packaged.serves) as self._processes:
            self._build(checkpoint, progress)
        self.config = packaged.decided(self.config)

    def _build(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """Build the worker: load weights, bind the drafter, size the KV cache."""
        config, c = self.config, checkpoint.config
        if config.device.type == "cuda":
            torch.cuda.set_device(config.device)
        elif "OMP_NUM_THREADS" not in os.environ:
            self._leave_a_core()
        make_attention = functools.cache(self._attention)
        ranks = self._group.ranks
        attention = {shape: make_attention(*shape[:2]) for shape in c.attention_shapes_of(ranks)}
        self.config = config = graph_modes(self.config, next(iter(attention.values())))
        spec = config.speculative or SpeculativeConfig()
        drafter = make_drafter(spec, c)  # raises before weights are loaded
        model, tower = self._load(checkpoint, make_attention, progress)
        self.paths, k = max(1, len(spec.paths)), drafter.num_drafts
        specs = model.state_specs()
        self.config = config = with_forced_drafts(
            self.config, drafter, self.paths, recurrent=has_recurrent_state(specs)
        )
        self.widths = RoundWidths(1 + k, 1 + max(k, *config.forced_drafts, 0))
        self.max_extend_rows = min(MAX_EXTEND_ROWS, config.max_num_seqs)
        self.decode_sizes = decode_sizes(config)
        memory = SleepingMemory(config.device) if config.requested.enable_sleep_mode else None
        sizes = config.max_num_seqs + 1, self.paths, config.max_model_len, self.widths.host_drafted
        store = StateStore(*sizes, config.device, None if memory is None else memory.zeros)
        listed = [catalog.features.load(name) for name in catalog.features.listed]
        schema = slot_schema([field for feature in listed for field in feature.slot_fields(c)])
        slots = Slots(config.max_num_seqs, config.max_model_len, c.vocab_size, store, schema)
        store.declare("target", specs)
        self.worker = Worker(model, drafter, store, slots, GraphSet(config.device, {}, config.requested.compile), tower)
        self.worker.updater, self.worker.memory = self._updater(checkpoint, spec), memory
        self.choices, why = draft_choices(self.config, drafter.num_drafts)
        if drafter.num_drafts:
            self.decide("drafts per round", ", ".join(map(str, self.choices)), why)
        self.shared = self._shared(drafter, has_recurrent_state(specs))
        pausable = len(self.choices) > 1 and isinstance(drafter, PausableDrafter)
        self.max_unobserved = max_unobserved_tokens(config) if pausable else 0
        sampler = DraftSampler(slots, spec.paths)
        with agreeing(agreement(self._group)), claimed_by(self.worker):
            drafter.bind(self._context(sampler, progress))
        if memory is not None:
            memory.place((*self.worker.modules(), *modules_of(drafter)))
        store.declare("drafter", drafter.state_specs())
        few = dict.fromkeys(store.window_groups, 2)  # for padding, until the number of pages is known
        self.worker.hold_pages(few, snapshots=1)
        self.request_features = self._load_features(listed, checkpoint)
        self._modules = self._lent(spec, sampler)
        if config.device.type == "cuda":
            with self.stage("compile"), agreeing(agreement(self._group)), claimed_by(self.worker):
                self._compile(attention, self._programs())
        else:
            self._fuse_tails()
        with self.stage("size the KV cache"):
            self._size()
            self.config = hold_host_pages(self.config, self.worker, self._group)
        self.worker.graphs.programs = self._programs()

    def _load(
        self, checkpoint: Checkpoint, attention: Callable[..., BreakingAttention], progress: Progress
    ) -> tuple[Decoder, AnyTower | None]:
        """Load the model and, for a vision model, its tower."""
        config = self.config
        common: dict[str, Any] = {
            "dtype": config.dtype,
            "device": config.device,
            "load_format": config.requested.load_format,
            "seed": config.requested.seed,
        }
        own: dict[str, Any] = {
            "max_positions": config.max_model_len,
            "ranks": self._group.ranks,
            "kv_dtype": config.kv_dtype,
        }
        with self.stage("load"):
            model = load_model(checkpoint, attention=attention, progress=progress, **own, **common)
            tower = load_tower(checkpoint, progress=progress, **common)
        for passed_over in checkpoint.unread() if config.requested.load_format == "auto" else ():
            self.decide(*passed_over)
        self.decide("weights", *checkpoint.quantization.decision())
        self._tell_ranks(model)
        return model, tower

    def _updater(self, checkpoint: Checkpoint, spec: SpeculativeConfig) -> WeightUpdater:
        """Return the updater of the worker's modules."""
        requested, worker = self.config.requested, self.worker
        seed = requested.seed if requested.load_format == "dummy" else None
        draft = checkpoint.path if spec.model is None else catalog.resolve_name(spec.model)
        modules = worker.model, worker.tower, worker.drafter
        return WeightUpdater(*modules, checkpoint, seed, worker.unused_pages, str(draft))

    def close(self) -> None:
        """Release the programs and their parts."""
        del self.request_features, self._modules

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage of the start."""
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 3)

    def decide(self, name: str, value: object, reason: str) -> None:
        """Add a decision to the resolved configuration."""
        self.config = self.config.decide(name, value, reason)

    def buckets(self, programs: dict[str, Program]) -> list[Buckets]:
        """Return the capture candidates of these programs."""
        features = self.worker.drafter.features
        usual = [feature.expected_rounds for feature in self.request_features]
        usual_rounds = [each for each in usual if each != NO_FEATURES]
        sizes = self.choices, features, self.max_unobserved
        buckets = engine_buckets(programs, self.config, *sizes, self._expected, usual_rounds, self._whole)
        buckets += [own_buckets(own, self.config) for own in self._own_programs]
        if self.config.requested.graph_capture == "lazy":
            buckets = [captured_lazily(each, self.config) for each in buckets]
        return buckets

    def _tell_ranks(self, model: Decoder) -> None:
        """Record how the model is divided among ranks."""
        ranks = self._group.ranks
        if ranks.count > 1:
            for choice in (*rank_decisions(model), ("gathers go", *described(ranks.transport))):
                self.decide(*choice)
        if model.divides_logits:
            value = f"{key_bytes(model.lm_head.outputs)} bytes a row from 17 rows on: the best of each part"
            self.decide("gathered of logits", value, "whole rows where a request filters or asks for log-probabilities")

    def _shared(self, drafter: Drafter, recurrent: bool) -> tuple[int, ...]:
        """Return the numbers of drafts that requests share in a round."""
        shared, why = shared_choices(self.config, drafter, self.choices, recurrent)
        if len(self.choices) > 2 or shared:
            self.decide("drafts shared by requests", ", ".join(map(str, shared)) + " a row" if shared else "none", why)
        return shared

    @property
    def _whole(self) -> Features:
        """Return the features that read whole rows of logits; none if each rank computes whole rows."""
        return Features(whole_logits=True) if self.worker.model.divides_logits else NO_FEATURES

    def _leave_a_core(self) -> None:
        """Use all cores but one: waiting threads spin, and would take CPU time from the API process."""
        count = self._group.ranks.count
        threads = max(1, (len(os.sched_getaffinity(0)) - 1) // count)
        torch.set_num_threads(threads)
        among = f", divided among {count} ranks" if count > 1 else ""
        self.decide("threads", threads, f"all cores but one{among}; OMP_NUM_THREADS sets it")

    def _attention(self, heads: int, kv_heads: int) -> BreakingAttention:
        """Return a backend of the configured kind, which ends a captured segment at eager breaks."""
        config = self.config
        return BreakingAttention(catalog.attention.load(config.attention_backend)(heads, kv_heads, config.device))

    def _context(self, sampler: DraftSampler, progress: Progress) -> DrafterContext:
        """Return the drafter's context."""
        config, worker = self.config, self.worker
        return DrafterContext(
            target=worker.model,
            slots=worker.slots,
            attention=self._attention,
            sample=sampler,
            sample_block=sampler.block,
            best=sampler.best,
            state=worker.store.view("drafter"),
            target_state=worker.store.view("target"),
            page_tables=worker.store.page_tables,
            dtype=config.dtype,
            device=config.device,
            max_model_len=config.max_model_len,
            page_size=PAGE_SIZE,
            progress=lambda share: progress("load draft", share),
            decide=self.decide,
            max_unobserved=self.max_unobserved,
            ranks=self._draft_ranks,
            rotary=lambda slots, positions: rotary_positions(worker.slots, slots, positions),
        )

    @property
    def _draft_ranks(self) -> Ranks:
        """Return the ranks that share the draft model."""
        spec, drafter, ranks = self.config.speculative, self.worker.drafter, self._group.ranks
        if spec is None or ranks.count == 1 or not isinstance(drafter, DivisibleDrafter):
            return ALONE
        size = spec.draft_tensor_parallel_size
        divided = drafter.divides(ranks) if size is None else size > 1
        value = f"divided among {ranks.count} ranks" if divided else "whole on every rank"
        self.decide("draft layers", value, "by default" if size is None else f"draft_tensor_parallel_size={size}")
        return ranks if divided else ALONE

    def _load_features(self, listed: Sequence[type[Feature]], checkpoint: Checkpoint) -> list[Feature]:
        """Load the features of passes."""
        c, requested, worker = checkpoint.config, self.config.requested, self.worker
        if requested.enable_lora:
            kept = max(requested.max_loras, requested.max_cpu_loras or 0)
            limits = AdapterLimits(requested.max_loras, requested.max_lora_rank, kept)
            worker.adapters = HeldAdapters(attach_adapters(worker.model, checkpoint.family, limits))
        context = FeatureContext(
            directory=Path(requested.tokenizer) if requested.tokenizer else checkpoint.path,
            eos=checkpoint.eos_token_ids,
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            dtype=self.config.dtype,
            max_rows=self.max_extend_rows,
            paths=self.paths,
            reported=ReportedValues.of(requested.logprobs_mode),
            synthetic=requested.synthetic,
            slots=worker.slots,
            logits=lambda hidden: worker.model.logits(hidden),
            vision=c.vision,
            tower=worker.tower,
            device=self.config.device,
            drafts=worker.drafter.features.hidden is not Hidden.NULL,
            max_tokens=self.config.max_num_batched_tokens,
            max_model_len=self.config.max_model_len,
            cache_bytes=self.config.encoder_cache_bytes,
            decide=self.decide,
            routers=RouterRecorder(worker.model),
            adapters=worker.adapters,
            adapter_modules=requested.lora_modules,
            whole_logits=self._whole,
            whole_text=c.whole_text,
            pools=c.architecture in HEADLESS or c.architecture in ENCODERS,
        )
        return [feature(context) for feature in listed]

    @property
    def _expected(self) -> list[Features]:
        """Return the features that many prompt passes are expected to need."""
        return [feature.expected for feature in self.request_features if feature.expected != NO_FEATURES]

    @property
    def _own_programs(self) -> list[OwnProgram]:
        """Return the programs of the features."""
        return [own for feature in self.request_features for own in feature.programs()]

    def _lent(self, spec: SpeculativeConfig, sampler: DraftSampler) -> Callable[[], PassContext]:
        """Return a function that makes pass modules over the pages that the worker holds at the time of the call."""
        w, config = self.worker, self.config
        rule = candidate_rule(config.requested, w.slots)

        def modules() -> PassContext:
            tree = None
            if isinstance(w.drafter, TreeDrafter) and spec.paths:
                tree = Tree.of(spec.paths, w.drafter, w.slots, w.store, w.num_pages)
            return PassContext(w.model, w.drafter, w.slots, sampler, w.store, self.request_features, rule, tree)

        return modules

    def _programs(self) -> dict[str, Program]:
        """Return every program of the engine by name, over the pages that the worker holds now."""
        modules, drafter = self._modules(), self.worker.drafter
        programs = [round_program(modules), verify_program(modules)]
        programs += [extend_program(modules, self.max_extend_rows, name) for name in ("extend", "score")]
        if self.decode_sizes:
            programs.append(mixed_program(modules, self.max_extend_rows))
        if self.widths.plain > 1:
            programs.append(draft_program(modules))
        programs += [shared_round_program(modules, drafts) for drafts in self.shared]
        if self.max_unobserved and isinstance(drafter, PausableDrafter):
            programs.append(catch_up_program(drafter, self.worker.slots))
        programs += [own.program for own in self._own_programs]
        return {program.name: program for program in programs}

    def _compile(
        self, attention: Mapping[tuple[int, int, int], BreakingAttention], programs: dict[str, Program]
    ) -> None:
        """Compile the kernels of all passes; first the exact kernels, whose proofs choose the kernels of larger passes.

        attention: the backend of each distinct (query heads, KV heads, head size) of the model.
        """
        config, worker = self.config, self.worker
        plain_pages = config.kv_dtype == config.dtype
        with compiling_only(config.device, self._processes):
            rehearse_proofs(worker.modules())
            rehearse_experts(worker.modules())
            rehearse_tails(worker.modules())
            for (_, _, head_dim), backend in attention.items():
                if plain_pages:
                    backend.rehearse(head_dim, config.dtype)
        self._prove_exact()
        self._fuse_tails()
        for (heads, kv_heads, head_dim), backend in attention.items():
            which = f", {heads} heads over {kv_heads} of {head_dim}" if len(attention) > 1 else ""
            of_e4m3 = {"attention": ("one kernel", "those for Hopper read pages of 16 bits")}
            settled = backend.prove(head_dim, config.dtype) if plain_pages else of_e4m3
            for name, (what, why) in settled.items():
                self.decide(name + which, what, why)
        launched = "while the one before it ends" if overlaps(config.device) else "when its turn comes"
        self.decide("a layer's kernel is launched", launched, "ahead of its turn from compute capability 9.0 on")
        with compiling_only(config.device, self._processes):
            run_kinds_on_padding(self._needing_every_kernel(programs), config.device)

    def _needing_every_kernel(self, programs: dict[str, Program]) -> list[tuple[Program, PassShape]]:
        """Return passes that together need the kernels of all passes, including those that are measured next."""
        own, features = {own.program.name for own in self._own_programs}, self.worker.drafter.features
        usual = warmup_passes(self.buckets(programs), (features, features | self._whole), own)
        return [*usual, *self._largest(programs)]

    def _largest(self, programs: dict[str, Program]) -> list[tuple[Program, PassShape]]:
        """Return the passes that take most memory, with all features."""
        config, masked = self.config, replace(self.worker.drafter.features | self._whole, masks=True)
        prompts = functools.reduce(operator.or_, self._expected, masked)
        largest = [(programs["extend"].of(prompts), PassShape(config.max_num_batched_tokens))]
        if self.paths > 1:  # the rounds of a tree may be larger than any prompt pass
            largest.append((programs["round"].of(masked), PassShape(config.max_num_seqs, self.widths.plain)))
        if self.decode_sizes:
            rows = self.decode_sizes[-1]
            mixed = programs["mixed"]  # with all fields
            mixed = replace(mixed, schema=replace(mixed.schema, features=masked))
            largest.append((mixed, PassShape(config.max_num_batched_tokens, 1 + rows)))
        return [*largest, *((own.program, PassShape(own.most)) for own in self._own_programs)]

    def _prove_exact(self) -> None:
        """Check, for each GEMM shape, that the BLAS of long passes gives the same bits as the Triton kernel."""
        proven = prove_linears(self.worker.modules())
        failed = [f"{n}×{k}" for (n, k), exact in proven.items() if not exact]
        value = "cuBLASLt" if not failed else f"Triton for {', '.join(failed)}"
        reason = f"bits compared with the Triton kernel's for {len(proven)} shapes, {len(failed)} differ"
        self.decide(f"products above {TRITON_ROWS} rows", value, reason)
        if of_experts := prove_experts(self.worker.modules()):
            value = "a kernel of their own" if all(of_experts) else "the kernel of rounds"
            reason = "on Hopper, weights of 16 bits or e4m3 without biases; bits compared with the kernel of rounds"
            self.decide("experts of prompts", value, reason)

    def _fuse_tails(self) -> None:
        """Fuse the layer tail (o_proj → MLP → next qkv) into one launch, if that gives the same bits."""
        layers, fused, possible = fuse_tails(self.worker.modules())
        value = f"{fused} of {layers} layers in one launch up to {MOST_ROWS} rows"
        reason = "layers with an MLP and 16-bit weights; none with UNISONO_STAYING_LAUNCHES=0"
        self.decide(
            "what follows a mixer", value, reason if fused == possible else f"{possible - fused} differ in bits"
        )

    def _size(self) -> None:
        """Allocate as many pages as fit."""
        config, worker = self.config, self.worker
        held, dtype = worker.store.token_bytes("target"), str(config.kv_dtype).removeprefix("torch.")
        self.config = config = config.decide("KV cache", f"{held} bytes a token", f"{dtype}, the target's layers")
        reserved = path_pages(self.paths, self.widths.plain - 1, config.max_num_seqs)
        sampled = max(config.max_num_seqs * self.widths.plain, MAX_VERIFIED)
        sampled += config.max_num_seqs * (1 + self.shared[-1]) if self.shared else 0
        logits = 4 * sampled * worker.model.config.vocab_size
        demand = PageDemand(
            page_bytes={
                window_group: worker.store.page_bytes(window_group) for window_group in worker.store.window_groups
            },
            windows=self._window_pages(),
            snapshot_bytes=worker.store.snapshot_bytes(),
            paths=self.paths,
            path_pages=reserved,
            ranks=self._group.ranks.page_ranks,
            logits_bytes=logits if self.paths == 1 else 0,  # the rounds of a tree are measured
            staging_bytes=staging_bytes(
                config, max(worker.store.snapshot_bytes(), *map(worker.store.page_bytes, worker.store.window_groups))
            ),
        )

        def measure() -> int:
            largest = self._largest(self._programs())
            used, allocated = peak_bytes(largest, config.device, self._notes.allocated_known)
            self._notes.save_allocated(allocated)
            peaks: list[int] = self._group.exchange(used)
            return max(peaks)

        pages, snapshots, self.config = fit_pages(config, demand, measure)
        pages, snapshots, of_first = decided(self._group, (pages, snapshots, self.config))
        self.config = replace(of_first, device=config.device)
        worker.hold_pages(pages, reserved, snapshots)

    def _window_pages(self) -> dict[int, int]:
        """Return the pages of each window group: enough for all requests together, and as many again for cached
        prefixes.
        """
        config, worker = self.config, self.worker
        sizes = StateSizes(self.widths.host_drafted, config.max_num_batched_tokens, config.max_model_len)
        windows = {w: WindowPool(w, 1) for w in worker.store.window_groups if w != ALL}
        prompt, after = (sizes.quota(windows, prompt=each) for each in (True, False))
        return {w: 1 + prompt[w] + 2 * config.max_num_seqs * after[w] for w in windows}
