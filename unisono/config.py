"""Configuration as data: what was asked for, and what it resolves to, with the reason of every choice.

:class:`EngineConfig` holds the flags. :func:`resolve` never mutates it: it returns a
:class:`ResolvedConfig` in which nothing is ``auto``, and a decision for each automatic choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from unisono.types import MAX_LOGPROBS, ConfigError, SpeculativeConfig
from unisono.vectors import DTYPES

DTYPE_ALIASES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
GPU_MAX_SEQS, CPU_MAX_SEQS = 256, 16
GPU_BATCHED_TOKENS, CPU_BATCHED_TOKENS = 8192, 512

GRAPH_MODES = ("auto", "full", "segmented", "off")
GRAPH_PROGRAMS = ("extend", "round", "score")
"""What ``--graphs`` may name: prompt passes, rounds, prompt passes that report prompt log-probabilities."""


@dataclass(frozen=True)
class EngineConfig:
    """The engine's flags; names are vLLM's and SGLang's. ``None`` and ``"auto"`` are resolved.

    model: a checkpoint directory or the name of a bundled one.
    dtype: auto, float32, float16 (half) or bfloat16.
    max_model_len: tokens per request, prompt and output together.
    gpu_memory_utilization: share of the card's memory the engine may take, 0 … 1.
    snapshot_share: share of the KV cache's bytes that snapshots of recurrent layers may take, for the prefix cache.
    max_num_seqs: requests that run at once. max_num_batched_tokens: prompt tokens per extend pass.
    max_stall_ms: milliseconds between two rounds of running requests, at most: prompt passes between them are as large
    as fits, by what passes cost.
    mm_encoder_cache_gb: GiB of the device that encoded pictures may take; None: a default of 1 GiB, less on a CPU.
    load_format: auto, or dummy for random weights (needs config.json only).
    quantization: None: weights as the checkpoint has them. fp8: quantises a plain checkpoint while loading. Any method
    that the checkpoint's quantization_config does not name is an error.
    enforce_eager: short for graphs="off".
    graphs: auto, full, segmented or off, for all passes or for some: "extend=segmented,round=full". auto captures
    whole where the attention backend allows it, and prompt passes only in sizes where a graph pays; full and segmented
    replay every pass. off captures nothing; every pass runs eagerly and is counted.
    compile: pieces of every captured pass go through torch.compile first.
    graph_memory: GiB that graphs may take; None: a share of what is free before the KV cache is sized.
    speculative: how drafts are made; None: with the MTP modules that the checkpoint carries, and not at all where it
    carries none. The method "none" turns speculation off. synthetic_acceptance_length: benchmarks only: accept so
    many tokens a round on average, bonus included, whatever the drafts are; the text is then meaningless.
    synthetic_acceptance_rates: benchmarks only, the same by place: the share of rounds in which draft 1, 2 … is
    accepted, as /metrics counts it; places beyond the last never are.
    generation_config: where sampling defaults come from: auto: the checkpoint's generation_config.json; vllm: vLLM's
    neutral ones; or a directory with that file. EOS ids are the checkpoint's either way.
    tokenizer: directory of the tokenizer; None: the checkpoint's.
    logprobs_mode: log-probabilities of the model's own logits (raw), or of what tokens are drawn from: edited, divided
    by the temperature, filtered (processed).
    max_logprobs: what a request's logprobs may ask for at each position; -1: any number. More than 20 take whole rows
    of logits to the host.
    scheduling_policy: fcfs: first come, first served. priority: lower priority values first, then the same.
    enable_prefix_caching: whether a prompt may begin with pages that an earlier one left. It changes no text.
    enable_prompt_embeds, enable_return_hidden_states: whether the server takes embeddings in requests, and puts hidden
    states into answers. The offline interface always does.
    """

    model: str = "tiny"
    dtype: str = "auto"
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    snapshot_share: float = 0.1
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_stall_ms: float = 50.0
    mm_encoder_cache_gb: float | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    quantization: str | None = None
    seed: int = 0
    attention_backend: str = "auto"
    enforce_eager: bool = False
    graphs: str = "auto"
    compile: bool = False
    graph_memory: float | None = None
    device: str = "auto"
    num_pages: int | None = None
    speculative: SpeculativeConfig | None = None
    synthetic_acceptance_length: float | None = None
    synthetic_acceptance_rates: tuple[float, ...] = ()
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    max_logprobs: int = MAX_LOGPROBS
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    enable_prefix_caching: bool = True
    enable_prompt_embeds: bool = False
    enable_return_hidden_states: bool = False
    generation_config: str = "auto"
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DTYPE_ALIASES.get(self.dtype, self.dtype))
        _one_of("--dtype", self.dtype, ("auto", *DTYPES))
        _one_of("--load-format", self.load_format, ("auto", "dummy"))
        _one_of("--logprobs-mode", self.logprobs_mode, ("raw_logprobs", "processed_logprobs"))
        _one_of("--scheduling-policy", self.scheduling_policy, ("fcfs", "priority"))
        _one_of("--device", self.device.split(":")[0], ("auto", "cpu", "cuda"))
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"--gpu-memory-utilization {self.gpu_memory_utilization}: give a share above 0, at most 1."
            )
        if self.mm_encoder_cache_gb is not None and not self.mm_encoder_cache_gb > 0:
            raise ConfigError(f"--mm-encoder-cache-gb {self.mm_encoder_cache_gb}: give GiB above 0.")
        if not 0.0 < self.snapshot_share < 1.0:
            raise ConfigError(f"--snapshot-share {self.snapshot_share}: give a share above 0 and below 1.")
        for name, low in (("max_model_len", 2), ("max_num_seqs", 1), ("max_num_batched_tokens", 16), ("num_pages", 2)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: give at least {low}.")
        if self.max_logprobs < -1:
            raise ConfigError(f"--max-logprobs {self.max_logprobs}: give a whole number, or -1 for no limit.")
        if not self.max_stall_ms > 0:
            raise ConfigError(f"--max-stall-ms {self.max_stall_ms}: give milliseconds above 0.")
        self._check_files()
        self._check_graphs()
        forced = self.synthetic_acceptance_length
        longest = 1 + (self.speculative.num_speculative_tokens if self.speculative else 0)
        if forced is not None and not 1 <= forced <= longest:
            raise ConfigError(f"--synthetic-acceptance-length {forced}: give 1 to {longest} (1 + k).")
        rates = self.synthetic_acceptance_rates
        if not all(1 >= a >= b >= 0 for a, b in pairwise((1.0, *rates))):
            raise ConfigError(
                f"--synthetic-acceptance-rates {rates}: give shares of rounds, 1 to 0, none above the last."
            )
        if rates and (forced is not None or self.speculative is None):
            raise ConfigError("--synthetic-acceptance-rates needs speculation, and no --synthetic-acceptance-length.")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed {self.seed}: give a whole number from 0 to {2**63 - 1}.")

    @property
    def synthetic(self) -> bool:
        """Whether acceptance is not the drafter's own."""
        return self.synthetic_acceptance_length is not None or bool(self.synthetic_acceptance_rates)

    def _check_files(self) -> None:
        """That directories which flags name have what they are named for."""
        if self.tokenizer is not None and not any(Path(self.tokenizer).glob("*token*")):
            raise ConfigError(f"--tokenizer {self.tokenizer}: there is no tokenizer; give a directory that has one.")
        source = self.generation_config
        if source not in ("auto", "vllm") and not (Path(source) / "generation_config.json").is_file():
            raise ConfigError(
                f"--generation-config {source}: it has no generation_config.json; give auto, vllm or a directory."
            )

    def _check_graphs(self) -> None:
        modes = parse_graphs(self.graphs)
        if self.enforce_eager and self.graphs not in ("auto", "off"):
            raise ConfigError(f"--enforce-eager captures no graph, --graphs {self.graphs} does: drop one of them.")
        if self.compile and (self.enforce_eager or set(modes.values()) == {"off"}):
            raise ConfigError("--compile compiles what graphs capture, and graphs are off: drop it, or --graphs off.")
        if self.graph_memory is not None and not self.graph_memory > 0:
            raise ConfigError(f"--graph-memory {self.graph_memory}: give GiB above 0, or --graphs off for none.")


def parse_graphs(text: str) -> dict[str, str]:
    """The mode of each program of "MODE" or "PROGRAM=MODE,…"; those that are not named are auto. Raises ConfigError."""
    if "=" not in text:
        _one_of("--graphs", text, GRAPH_MODES)
        return dict.fromkeys(GRAPH_PROGRAMS, text)
    modes = dict.fromkeys(GRAPH_PROGRAMS, "auto")
    for part in text.split(","):
        program, _, mode = (word.strip() for word in part.partition("="))
        _one_of(f"--graphs {text}: the program", program, GRAPH_PROGRAMS)
        _one_of(f"--graphs {text}: the mode", mode, GRAPH_MODES)
        modes[program] = mode
    return modes


@dataclass(frozen=True)
class Hardware:
    """The machine as the engine sees it."""

    device: torch.device
    name: str
    total_bytes: int

    @staticmethod
    def detect(device: str) -> Hardware:
        """``auto`` is the first GPU, or the CPU when there is none. Raises ConfigError for an absent GPU."""
        gpu = torch.cuda.is_available()
        if device == "auto":
            device = "cuda" if gpu else "cpu"
        if device.startswith("cuda"):
            if not gpu:
                raise ConfigError("--device cuda: no NVIDIA GPU is visible here; use --device cpu.")
            index = int(device.partition(":")[2] or 0)
            if index >= torch.cuda.device_count():
                raise ConfigError(f"--device {device}: {torch.cuda.device_count()} GPUs are visible.")
            properties = torch.cuda.get_device_properties(index)
            return Hardware(torch.device("cuda", index), properties.name, properties.total_memory)
        return Hardware(torch.device("cpu"), "CPU", 0)


class CheckpointFacts(Protocol):
    """What :func:`resolve` reads of a checkpoint (models/checkpoint.py)."""

    @property
    def dtype(self) -> torch.dtype | None: ...
    @property
    def config(self) -> Any: ...


@dataclass(frozen=True)
class Decision:
    """One automatic choice: the setting, the value it got, and why."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class ResolvedConfig:
    """An :class:`EngineConfig` with nothing left open.

    graphs: the mode of each program. graph_bytes: what graphs may take, once the memory is known. speculative: None
    where nothing drafts.
    """

    asked: EngineConfig
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    attention_backend: str
    graphs: Mapping[str, str] = field(default_factory=dict)
    graph_bytes: int = 0
    speculative: SpeculativeConfig | None = None
    decisions: tuple[Decision, ...] = ()

    def decide(self, name: str, value: object, reason: str, **changes: Any) -> ResolvedConfig:
        """A copy with one decision more and, if given, changed fields."""
        decision = Decision(name, str(value), reason)
        return dataclasses.replace(self, decisions=(*self.decisions, decision), **changes)

    @property
    def encoder_cache_bytes(self) -> int | None:
        """``mm_encoder_cache_gb`` in bytes."""
        asked = self.asked.mm_encoder_cache_gb
        return None if asked is None else int(asked * (1 << 30))

    def explain(self) -> dict[str, object]:
        """The resolved settings and every decision, as JSON-ready data."""
        settings = {
            "model": self.asked.model,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_stall_ms": self.asked.max_stall_ms,
            "attention_backend": self.attention_backend,
            "load_format": self.asked.load_format,
            "quantization": self.asked.quantization,
            "gpu_memory_utilization": self.asked.gpu_memory_utilization,
            "snapshot_share": self.asked.snapshot_share,
            "mm_encoder_cache_gb": self.asked.mm_encoder_cache_gb,
            "enforce_eager": self.asked.enforce_eager,
            "graphs": dict(self.graphs),
            "compile": self.asked.compile,
            "graph_bytes": self.graph_bytes,
            "generation_config": self.asked.generation_config,
            "tokenizer": self.asked.tokenizer,
            "logprobs_mode": self.asked.logprobs_mode,
            "max_logprobs": self.asked.max_logprobs,
            "scheduling_policy": self.asked.scheduling_policy,
            "enable_prefix_caching": self.asked.enable_prefix_caching,
            "enable_prompt_embeds": self.asked.enable_prompt_embeds,
            "enable_return_hidden_states": self.asked.enable_return_hidden_states,
            "seed": self.asked.seed,
            "speculative": dataclasses.asdict(self.speculative) if self.speculative else None,
            "synthetic_acceptance_length": self.asked.synthetic_acceptance_length,
            "synthetic_acceptance_rates": list(self.asked.synthetic_acceptance_rates),
        }
        return {"settings": settings, "decisions": [dataclasses.asdict(d) for d in self.decisions]}


def resolve(config: EngineConfig, hardware: Hardware, checkpoint: CheckpointFacts) -> ResolvedConfig:
    """Settle every ``auto``. Raises ConfigError for a flag that this checkpoint or machine cannot honour."""
    gpu = hardware.device.type == "cuda"
    decisions: list[Decision] = []

    def resolve_auto(name: str, asked: Any, value: Any, reason: str) -> Any:
        if asked not in (None, "auto"):
            return asked
        decisions.append(Decision(name, str(value).removeprefix("torch."), reason))
        return value

    device = resolve_auto("device", config.device, str(hardware.device), f"found: {hardware.name}")
    stored = checkpoint.dtype or torch.float32
    if not gpu:
        auto = (
            torch.float32,
            f"the CPU computes in float32; the checkpoint holds {str(stored).removeprefix('torch.')}",
        )
    elif stored is torch.float32:
        auto = (torch.bfloat16, "the checkpoint holds float32; bfloat16 halves what each step reads")
    else:
        auto = (stored, "the checkpoint's own")
    dtype = resolve_auto("dtype", config.dtype, *auto)
    limit = checkpoint.config.max_positions
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is above the model's context of {limit} tokens "
            "(max_position_embeddings in config.json). Give at most that."
        )
    seqs, tokens = (GPU_MAX_SEQS, GPU_BATCHED_TOKENS) if gpu else (CPU_MAX_SEQS, CPU_BATCHED_TOKENS)
    kind = "a GPU" if gpu else "a CPU"
    return ResolvedConfig(
        asked=config,
        device=torch.device(device),
        dtype=DTYPES.get(dtype, dtype),
        max_model_len=resolve_auto("max_model_len", config.max_model_len, limit, "the model's context"),
        max_num_seqs=resolve_auto("max_num_seqs", config.max_num_seqs, seqs, f"the default on {kind}"),
        max_num_batched_tokens=resolve_auto(
            "max_num_batched_tokens", config.max_num_batched_tokens, tokens, f"the default on {kind}"
        ),
        attention_backend=resolve_auto(
            "attention_backend", config.attention_backend, "triton", "exact at any width, batch and chunking"
        ),
        graphs=dict.fromkeys(GRAPH_PROGRAMS, "off") if config.enforce_eager else parse_graphs(config.graphs),
        speculative=config.speculative,
        decisions=tuple(decisions),
    )


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag} {value!r} is unknown; choose one of {', '.join(allowed)}.")
