"""The runner: the device side of the engine. Owns the model, the KV cache, the slots and the graphs.

It builds them at start; ``batch.py`` launches passes. It decides nothing about who runs.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from unisono import catalog
from unisono.attention.base import BreakingAttention
from unisono.config import ResolvedConfig
from unisono.drafters.base import Drafter, DrafterContext, PausableDrafter, TreeDrafter
from unisono.engine.buckets import (
    CPU_COST,
    CPU_GRAPH_BYTES,
    buckets_of,
    catch_up_buckets,
    check_full,
    draft_choices,
    gpu_graph_bytes,
    graph_modes,
    max_unobserved_tokens,
    round_buckets,
    with_graph_bytes,
)
from unisono.engine.slots import Slots
from unisono.engine.synthetic import acceptance_rule
from unisono.engine.warmup import compiling_only, run_on_padding, size_classes
from unisono.graphs.planner import Buckets, Planner
from unisono.kernels.linear import TRITON_ROWS
from unisono.kernels.overlap import overlaps
from unisono.layers.linear import prove_linears, rehearse_proofs
from unisono.models.checkpoint import Checkpoint
from unisono.models.config import DecoderConfig
from unisono.models.loader import load_model
from unisono.passes.extend import extend_program
from unisono.passes.features.base import Feature, FeatureContext
from unisono.passes.modules import Modules
from unisono.passes.round import catch_up_program, draft_program, held_drafts, round_program, verify_program
from unisono.passes.tree import Tree, path_pages
from unisono.program import Buffers, Key, Logits, Program, Shape
from unisono.sampling.pipeline import DraftSampler
from unisono.state.pages import pages_for
from unisono.state.specs import ALL, PAGE_SIZE, whole_requests
from unisono.state.store import StateStore
from unisono.types import ConfigError, SpeculativeConfig

MAX_EXTEND_ROWS = 32
"""Requests in one prompt pass at most."""

GPU_SLACK = 1 << 29
"""Bytes left for the allocator's slack when the KV cache is sized on a GPU, beside the graphs' budget."""

CPU_KV_BYTES = 1 << 30
"""The KV cache on a CPU: enough for the bundled models, at most."""


class Runner:
    """Builds everything on the device.

    ``progress`` is called with a stage's name and its share done, 0 … 1, while loading and capturing.
    Raises ConfigError when the card's memory does not hold the model and one request.
    """

    def __init__(self, config: ResolvedConfig, checkpoint: Checkpoint, progress: Callable[[str, float], None]) -> None:
        self.config = config
        self.seconds: dict[str, float] = {}
        if config.device.type == "cuda":
            torch.cuda.set_device(config.device)
        elif "OMP_NUM_THREADS" not in os.environ:
            self._leave_a_core()
        c = checkpoint.config
        attention = self._attention(c.num_heads, c.num_kv_heads)
        self.config = config = graph_modes(self.config, attention)
        spec = config.asked.speculative or SpeculativeConfig()
        self.drafter = drafter = self._drafter(spec, c)  # what cannot be is refused before loading
        with _Stage(self, "load"):
            self.model = load_model(
                checkpoint,
                dtype=config.dtype,
                device=config.device,
                load_format=config.asked.load_format,
                backend=attention,
                max_positions=config.max_model_len,
                seed=config.asked.seed,
                progress=progress,
            )
        self.paths = paths = max(1, len(spec.paths))
        ring = PAGE_SIZE + 2 * (1 + drafter.num_drafts)
        self.store = StateStore(config.max_num_seqs + 1, paths, config.max_model_len, ring, config.device)
        self.slots = slots = Slots(config.max_num_seqs, config.max_model_len, c.vocab_size, self.store)
        self.store.declare("target", whole_requests(self.model.state_specs()))
        self.sampler = DraftSampler(slots, spec.paths)
        self.choices, why = draft_choices(self.config, drafter.num_drafts)
        if drafter.num_drafts:
            self.decide("drafts per round", ", ".join(map(str, self.choices)), why)
        pausable = len(self.choices) > 1 and isinstance(drafter, PausableDrafter)
        self.max_unobserved = max_unobserved_tokens(config) if pausable else 0
        drafter.bind(self._context(progress))
        self.store.declare("drafter", drafter.state_specs())
        self.width, self.features = 1 + drafter.num_drafts, drafter.features
        self.masked = replace(drafter.features, masks=True)
        self._held = held_drafts(config.max_num_seqs, paths, self.width, config.device)
        self.max_extend_rows = min(MAX_EXTEND_ROWS, config.max_num_seqs)
        self.request_features = self._load_features(checkpoint)
        self._acceptance = acceptance_rule(config.asked, slots)
        self._hold_pages(2)  # for padding, until it is known how many fit
        if config.device.type == "cuda":
            with _Stage(self, "compile"):
                self._compile(attention, c.head_dim)
        with _Stage(self, "size the KV cache"):
            reserved = path_pages(paths, drafter.num_drafts, config.max_num_seqs)
            self._hold_pages(self._pages_that_fit(reserved), reserved)
        compile, asked = config.asked.compile, self.config.graph_bytes
        self.planner = Planner(config.device, compile=compile, budget=asked)
        with _Stage(self, "capture"):
            self.planner.capture(self._buckets(self._parts()), lambda share: progress("capture", share))
        check_full(self.config, self.planner.graphs())

    def _parts(self) -> Modules:
        """What passes are made of, with the pages that there are now."""
        spec, drafter, tree = self.config.asked.speculative, self.drafter, None
        if isinstance(drafter, TreeDrafter) and spec is not None and spec.paths:
            tree = Tree.of(spec.paths, drafter, self.slots, self.store, self.num_pages)
        kv, features = self.store.view("target").tree, self.request_features
        lent = (self.model, drafter, self.slots, self.sampler, kv, features)
        return Modules(*lent, self._acceptance, tree, self._held)

    def _load_features(self, checkpoint: Checkpoint) -> list[Feature]:
        """All that requests may ask for."""
        c, asked = checkpoint.config, self.config.asked
        context = FeatureContext(
            directory=checkpoint.path,
            eos=checkpoint.eos_token_ids,
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            dtype=self.config.dtype,
            max_rows=self.max_extend_rows,
            paths=self.paths,
            processed_logprobs=asked.logprobs_mode == "processed_logprobs",
            synthetic=asked.synthetic,
            slots=self.slots,
            logits=self.model.logits,
        )
        return [catalog.features.load(name)(context) for name in catalog.features.listed]

    def _compile(self, attention: BreakingAttention, head_dim: int) -> None:
        """Compile the kernels of all passes; first those that decide, by their bits, what the larger passes run."""
        config = self.config
        with compiling_only(config.device):
            rehearse_proofs(self.model.modules())
            attention.rehearse(head_dim, config.dtype)
        self._prove_exact()
        self.decide("attention of long prompts", *attention.prove(head_dim, config.dtype))
        launched = "while the one before it ends" if overlaps(config.device) else "when its turn comes"
        self.decide("a layer's kernel is launched", launched, "ahead of its turn from compute capability 9.0 on")
        with compiling_only(config.device):
            run_on_padding(self._passes(self._parts()), config.device)

    def _leave_a_core(self) -> None:
        """Use all cores but one: waiting threads spin, and would take the API process's turn."""
        threads = max(1, len(os.sched_getaffinity(0)) - 1)
        torch.set_num_threads(threads)
        self.config = self.config.decide("threads", threads, "all cores but one; OMP_NUM_THREADS sets it")

    def _attention(self, heads: int, kv_heads: int) -> BreakingAttention:
        """A backend of the kind that was asked for, which breaks captures where it must or is told to."""
        config = self.config
        return BreakingAttention(catalog.attention.load(config.attention_backend)(heads, kv_heads, config.device))

    def _drafter(self, spec: SpeculativeConfig, target: DecoderConfig) -> Drafter:
        """The drafter that was asked for, without its weights; ``none`` by default."""
        drafter = catalog.drafters.load(spec.method)(spec, target)
        if spec.paths and not isinstance(drafter, TreeDrafter):
            raise ConfigError(
                f"the method {spec.method!r}, as it is set up here, drafts chains only; a tree of {len(spec.paths)} "
                "paths is asked for: leave out speculative_token_tree, or topk and num_draft_tokens."
            )
        return drafter

    def _context(self, progress: Callable[[str, float], None]) -> DrafterContext:
        """What the drafter is lent."""
        config = self.config
        return DrafterContext(
            target=self.model,
            slots=self.slots,
            attention=self._attention,
            sample=self.sampler,
            best=self.sampler.best,
            state=self.store.view("drafter"),
            target_state=self.store.view("target"),
            dtype=config.dtype,
            device=config.device,
            max_model_len=config.max_model_len,
            page_size=PAGE_SIZE,
            progress=lambda share: progress("load draft", share),
            decide=self.decide,
            max_unobserved=self.max_unobserved,
        )

    def decide(self, name: str, value: object, reason: str) -> None:
        """Add a decision to the resolved configuration."""
        self.config = self.config.decide(name, value, reason)

    def forget(self) -> None:
        """Make slots and counts as if nothing had run. No request may hold a slot."""
        self.slots.reset()
        self.planner.forget()

    def _prove_exact(self) -> None:
        """Check, for each shape of product, that the BLAS that serves long passes gives the kernel's bits."""
        proven = prove_linears(self.model.modules())
        failed = [f"{n}×{k}" for (n, k), exact in proven.items() if not exact]
        value = "cuBLASLt" if not failed else f"Triton for {', '.join(failed)}"
        reason = f"bits compared with the Triton kernel's for {len(proven)} shapes, {len(failed)} differ"
        self.config = self.config.decide(f"products above {TRITON_ROWS} rows", value, reason)

    def _buckets(self, parts: Modules) -> list[Buckets]:
        """What may be captured of each program; see ``engine/buckets.py``."""
        config, features, masked = self.config, self.features, self.masked
        extend, score = (extend_program(parts, self.max_extend_rows, name) for name in ("extend", "score"))
        buckets = round_buckets(round_program(parts), config, self.choices, features)
        for variant in (features, masked):
            buckets.append(buckets_of(extend, config, 1, variant))
            buckets.append(buckets_of(score, config, 1, replace(variant, logits=Logits.ALL)))
        for drafts in {self.choices[0], self.choices[-1]}:
            buckets.append(buckets_of(verify_program(parts), config, 1 + drafts, masked))
        if self.width > 1:
            buckets.append(buckets_of(draft_program(parts), config, self.width, features))
        if self.max_unobserved and isinstance(self.drafter, PausableDrafter):
            buckets.append(catch_up_buckets(catch_up_program(self.drafter, self.slots), config, self.max_unobserved))
        return buckets

    def _passes(self, parts: Modules) -> list[tuple[Program, Shape]]:
        """Every small pass, and one of each size class of larger ones, the longest included."""
        passes: list[tuple[Program, Shape]] = []
        for b in self._buckets(parts):
            common = b.features == self.features and b.program.name in ("round", "extend", "catch_up")
            # Of the others one suffices: one kernel has a variant for masks.
            passes += [
                (b.program.of(b.features), shape) for shape in (size_classes(b.shapes) if common else b.shapes[:1])
            ]
        return passes

    def _hold_pages(self, num_pages: int, path_pages: int = 0) -> None:
        """Allocate the pages of target and drafter; replaces fewer ones."""
        self.num_pages, self.path_pages = num_pages, path_pages
        self.store.allocate({ALL: num_pages + path_pages})

    def _pages_that_fit(self, path_pages: int) -> int:
        """Pages that fit beside those of paths; on a GPU measured, by running the largest passes first."""
        asked, config = self.config.asked.num_pages, self.config
        page_bytes = self.store.page_bytes(ALL)
        whole = config.max_num_seqs * pages_for(config.max_model_len) + 1  # more can never be used
        if config.device.type == "cpu":
            fit, why = CPU_KV_BYTES // page_bytes, f"{CPU_KV_BYTES >> 20} MiB at most on a CPU"
            self.config = with_graph_bytes(self.config, CPU_GRAPH_BYTES, "the default on a CPU")
        else:
            used = self._peak_bytes()
            edited = 4 * config.max_num_seqs * self.width * self.model.config.vocab_size  # fp32 logits of a round
            held = used + GPU_SLACK + (edited if self.paths == 1 else 0)  # a tree's round is measured
            free = int(config.asked.gpu_memory_utilization * torch.cuda.mem_get_info()[1]) - held
            self.config = gpu_graph_bytes(config, free)
            fit = (free - self.config.graph_bytes) // page_bytes
            why = f"measured: weights and the largest pass take {used >> 20} MiB"
        if path_pages:
            why += f"; {path_pages} more are for {self.paths} paths of {config.max_num_seqs} requests"
            self.config = self.config.decide("path_pages", path_pages, f"{path_pages * page_bytes} bytes; {why}")
        pages = asked or min(whole, fit - path_pages)
        capacity = (pages - 1) * PAGE_SIZE
        if capacity < PAGE_SIZE:
            raise ConfigError(
                f"the model leaves room for {max(0, pages)} KV pages of {page_bytes} bytes ({why}): "
                "raise --gpu-memory-utilization or lower --max-num-batched-tokens"
                f"{', or ask for fewer paths or a lower --max-num-seqs' if path_pages else ''}."
            )
        if capacity < config.max_model_len:
            if config.asked.max_model_len is not None:
                raise ConfigError(
                    f"--max-model-len {config.max_model_len} needs {pages_for(config.max_model_len)} KV pages, "
                    f"{pages - 1} fit ({why}): lower it to {capacity}, or raise --gpu-memory-utilization."
                )
            reason = f"the KV cache holds {capacity} tokens; the model's context is {config.max_model_len}"
            self.config = self.config.decide("max_model_len", capacity, reason, max_model_len=capacity)
        if asked is None:
            self.config = self.config.decide("num_pages", pages, f"{PAGE_SIZE} tokens each; {why}")
        return pages

    def _peak_bytes(self) -> int:
        """Bytes of the card in use at the peak of the largest prompt pass, other programs' included.

        A tree's rounds may be larger than any prompt pass: of these the largest counts too.
        """
        parts = self._parts()
        passes = [(extend_program(parts, self.max_extend_rows), Shape(self.config.max_num_batched_tokens))]
        if self.paths > 1:
            passes.append((round_program(parts), Shape(self.config.max_num_seqs, self.width)))
        torch.cuda.synchronize()
        gc.collect()  # what an engine before this one left
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        # Only padding tokens: they compute everything but attention, which keeps no activations.
        for program, shape in passes:
            program.run(Buffers(program.schema.of(self.masked), shape, self.config.device))
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        grown = max(0, torch.cuda.max_memory_reserved() - before)
        used = total - free - (torch.cuda.memory_reserved() - before) + grown
        gc.collect()
        torch.cuda.empty_cache()
        return used

    def round_key(self, rows: int, drafts: int) -> Key:
        """Of a round of so many requests with so many drafts each."""
        return Key("round", Shape(rows, 1 + drafts), self.features)

    def extend_ms(self, tokens: int) -> float:
        """What a prompt pass of so many tokens takes on padding; on a CPU a fixed figure, for runs to be repeatable."""
        if self.config.device.type == "cpu":
            return CPU_COST.replay(tokens)
        return self.planner.expected_ms(Key("extend", Shape(tokens), self.features))

    def catch_up_key(self, rows: int) -> Key:
        """Of a pass in which the drafter catches up with so many requests."""
        return Key("catch_up", Shape(rows, self.max_unobserved))

    def close(self) -> None:
        """Free the graphs, then everything they were captured on."""
        for feature in self.request_features:
            feature.close()
        on_gpu = self.config.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()  # a drafter may be catching up still
        self.planner.close()
        del self.model, self.store, self.slots, self.sampler, self.request_features, self._acceptance
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()


class _Stage:
    """Times a stage of the start into ``runner.seconds``."""

    def __init__(self, runner: Runner, name: str) -> None:
        self._seconds, self._name = runner.seconds, name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds[self._name] = round(time.perf_counter() - self._started, 3)
