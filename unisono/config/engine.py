"""The engine's configuration as data: the flags, their resolved values, and the reason of every automatic choice.

:class:`EngineConfig` holds the flags. :func:`resolve` never mutates it: it returns a :class:`ResolvedConfig` in which
nothing is ``auto``, and a decision for each automatic choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from unisono.config.preflight.ranks import check_visible
from unisono.config.synthetic_rates import Rates, rates_by_kind
from unisono.types import LOGPROBS_MODES, MAX_LOGPROBS, Concise, ConfigError, SpeculativeConfig
from unisono.types.vectors import DTYPES, dtype_of

if TYPE_CHECKING:
    import torch

DTYPE_ALIASES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
GPU_SIZES, CPU_SIZES = ("a GPU", 256, 8192), ("a CPU", 16, 512)
"""(device in words, default of max_num_seqs, default of max_num_batched_tokens)."""

KV_DTYPES = ("auto", "fp8", "fp8_e4m3", *DTYPES)
"""Values of ``--kv-cache-dtype``: the model's dtype, or e4m3 with a scale per token and KV head."""

MAX_FORCED_TOKENS = 15
"""The largest ``max_forced_tokens``."""

GRAPH_MODES = ("auto", "full", "segmented", "off")
GRAPH_PROGRAMS = ("extend", "round", "score")
"""Programs in ``--graphs``: prompt passes, rounds, and prompt passes that report prompt log-probabilities."""


@dataclass(frozen=True, repr=False)
class EngineConfig(Concise):
    """The engine's flags, with vLLM's and SGLang's names.

    ``None`` and ``"auto"`` are resolved.

    model: a checkpoint directory or the name of a bundled one. dtype: auto, float32, float16 (half) or bfloat16.
    kv_cache_dtype: dtype of keys and values. auto: the model's. fp8 or fp8_e4m3: e4m3 (docs/guide/quantise.md).
    max_model_len: tokens per request, prompt and output together.
    gpu_memory_utilization: fraction of the GPU's memory that the engine may use, 0 … 1.
    snapshot_share: fraction of the KV cache's bytes for snapshots of recurrent layers, which the prefix cache needs.
    snapshot_points: snapshots inside a prompt that is computed for the first time, at most; each costs a prompt pass.
    max_num_seqs: requests that run at once. max_num_batched_tokens: prompt tokens per extend pass.
    max_stall_ms: longest time between two rounds of running requests, in milliseconds. Prompt passes in between are as
    large as this allows, by the measured cost of passes.
    max_forced_tokens: drafts per round that a request's grammar leaves no choice about, at most; 0: none. None: the
    drafter's k, or 7 without a drafter.
    enable_mixed_chunk: decode running requests in prompt passes if their rounds would draft nothing. None: on GPUs.
    mm_encoder_cache_gb: GiB of device memory for encoded images. None: 1 GiB, less on a CPU.
    load_format: auto, or dummy for random weights (needs config.json only).
    quantization: None: as in the checkpoint, a GGUF file dequantised. fp8: quantise plain weights while loading. gguf:
        keep integers of a GGUF file packed. Another method must be that of the checkpoint's quantization_config.
    enforce_eager: short for graphs="off".
    graphs: auto, full, segmented or off, for all passes or by program: "extend=segmented,round=full". auto: whole
    passes if the attention backend allows it, and prompt passes only in sizes that profit; off: every pass is eager.
    graph_capture: start: capture graphs before the first request. lazy: capture each graph before the first pass that
    replays it, for programs that end soon; the self-test of drafts is skipped.
    compile: send the pieces of every captured pass through torch.compile first.
    graph_memory: GiB for graphs; None: a fraction of the memory that is free before the KV cache is sized.
    speculative: the drafter. None: the MTP modules of the checkpoint, or no speculation if it has none. The method
    "none" turns speculation off.
    synthetic_acceptance_length: for benchmarks: accept this many tokens per round on average, bonus included, whatever
    the drafts are. The text is then meaningless.
    synthetic_acceptance_rates: for benchmarks: fraction of rounds in which draft 1, 2 … is accepted; later drafts are
    never accepted. Or such tuples for several kinds of requests; a request's kind is its seed modulo their number.
    enable_lora: requests may name adapters (docs/guide/adapters.md). max_loras: adapters on the device at once.
    max_lora_rank: largest rank of an adapter; memory is reserved for it. max_cpu_loras: adapters in host memory; None:
    as many as on the device. lora_modules: (name, directory) of adapters to load at start. lora_dtype: "auto" only: the
    model's.
    generation_config: source of sampling defaults. auto: the checkpoint's generation_config.json; vllm: vLLM's neutral
    ones; or a directory with that file. EOS ids are always the checkpoint's.
    tokenizer: directory of the tokenizer; None: the checkpoint's. hf_overrides: values in place of config.json's, by
    name; nested objects are merged. logprobs_mode: raw: of the model's logits; processed: after penalties, temperature
    and filters. max_logprobs: largest ``logprobs``; -1: no limit. Above 20, logit rows are copied to the host.
    scheduling_policy: fcfs: first come, first served. priority: lower priority values first, then fcfs.
    cpu_offload_gb: GiB of host memory for KV pages that the prefix cache evicts from the device; 0: none. Weights stay
    on the device. cpu_offload_ratio: the same as a multiple of the device's pages.
    kv_offload_dir: a directory for evicted pages. kv_offload_dir_gb: largest size of its files, GiB.
    role: prefill: compute prompts for other engines; decode: have prompts computed by others; both: either.
    transfer_listen: address that a prefill engine listens on, tcp://HOST:PORT or unix:///PATH. prefill_urls: addresses
    of a decode engine's prefill engines, separated by commas. transfer_backend: transport of pages between hosts: tcp,
    nixl (RDMA, if UCX finds it), or auto: nixl if both ends have it. transfer_timeout: seconds without news of a
    prefill engine after which a decode engine computes its prompts itself.
    enable_prefix_caching: reuse the KV pages of common prompt prefixes. It changes no text. enable_sleep_mode: hold
    weights and KV cache so that ``sleep`` can free their memory.
    tensor_parallel_size: processes, with a GPU each, that hold the model together; the text is the same as of one.
    enable_expert_parallel: place whole experts on the ranks; otherwise every expert is divided like other layers.
    enable_dp_attention: DP attention (MLA): each rank holds the latents of its own requests, and attends for them.
    expert_placement: file with the order of whole experts among the ranks, by layer.
    tp_reduce: gather: no sum is divided, and the text is that of one process. ordered: the products after attention and
    of the MLP are divided by inputs, and their terms are added in the order of ranks: faster, the same text for one
    number of ranks.
    enable_prompt_embeds: the server accepts embeddings in requests. enable_return_hidden_states,
    enable_return_routed_experts: the server returns these. The offline interface always does all three.
    """

    model: str = "tiny"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    snapshot_share: float = 0.1
    snapshot_points: int = 2
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_stall_ms: float = 50.0
    max_forced_tokens: int | None = None
    enable_mixed_chunk: bool | None = None
    mm_encoder_cache_gb: float | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    quantization: str | None = None
    seed: int = 0
    attention_backend: str = "auto"
    enforce_eager: bool = False
    graphs: str = "auto"
    graph_capture: Literal["start", "lazy"] = "start"
    compile: bool = False
    graph_memory: float | None = None
    device: str = "auto"
    num_pages: int | None = None
    speculative: SpeculativeConfig | None = None
    synthetic_acceptance_length: float | None = None
    synthetic_acceptance_rates: Rates | tuple[Rates, ...] = ()
    logprobs_mode: str = "raw_logprobs"
    max_logprobs: int = MAX_LOGPROBS
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    cpu_offload_gb: float = 0.0
    cpu_offload_ratio: float = 0.0
    kv_offload_dir: str | None = None
    kv_offload_dir_gb: float = 64.0
    role: Literal["prefill", "decode", "both"] = "both"
    transfer_listen: str | None = None
    prefill_urls: str | None = None
    transfer_backend: Literal["tcp", "nixl", "auto"] = "tcp"
    transfer_timeout: float = 10.0
    enable_prefix_caching: bool = True
    enable_sleep_mode: bool = False
    enable_prompt_embeds: bool = False
    enable_return_hidden_states: bool = False
    enable_return_routed_experts: bool = False
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_modules: tuple[tuple[str, str], ...] = ()
    lora_dtype: str = "auto"
    generation_config: str = "auto"
    tokenizer: str | None = None
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    enable_dp_attention: bool = False
    expert_placement: str | None = None
    tp_reduce: str = "gather"

    def __post_init__(self) -> None:
        self._check_dtypes()
        _one_of("--load-format", self.load_format, ("auto", "dummy"))
        _one_of("--logprobs-mode", self.logprobs_mode, LOGPROBS_MODES)
        _one_of("--scheduling-policy", self.scheduling_policy, ("fcfs", "priority"))
        _one_of("--tp-reduce", self.tp_reduce, ("gather", "ordered"))
        _one_of("--device", self.device.split(":")[0], ("auto", "cpu", "cuda"))
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"--gpu-memory-utilization {self.gpu_memory_utilization}: give a share in (0, 1].")
        if self.mm_encoder_cache_gb is not None and not self.mm_encoder_cache_gb > 0:
            raise ConfigError(f"--mm-encoder-cache-gb {self.mm_encoder_cache_gb}: give GiB above 0.")
        if not 0.0 < self.snapshot_share < 1.0:
            raise ConfigError(f"--snapshot-share {self.snapshot_share}: give a share above 0 and below 1.")
        for name, low in (
            ("max_model_len", 2),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 16),
            ("num_pages", 2),
            ("tensor_parallel_size", 1),
            ("snapshot_points", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: give at least {low}.")
        if self.max_logprobs < -1:
            raise ConfigError(f"--max-logprobs {self.max_logprobs}: give a whole number, or -1 for no limit.")
        if not self.max_stall_ms > 0:
            raise ConfigError(f"--max-stall-ms {self.max_stall_ms}: give milliseconds above 0.")
        if self.max_forced_tokens is not None and not 0 <= self.max_forced_tokens <= MAX_FORCED_TOKENS:
            raise ConfigError(f"--max-forced-tokens {self.max_forced_tokens}: give 0 to {MAX_FORCED_TOKENS}.")
        self._check_files()
        self._check_graphs()
        self._check_offload()
        self._check_role()
        self._check_adapters()
        forced = self.synthetic_acceptance_length
        longest = 1 + (self.speculative.num_speculative_tokens if self.speculative else 0)
        if forced is not None and not 1 <= forced <= longest:
            raise ConfigError(f"--synthetic-acceptance-length {forced}: give 1 to {longest} (1 + k).")
        if rates_by_kind(self.synthetic_acceptance_rates) and (forced is not None or self.speculative is None):
            raise ConfigError("--synthetic-acceptance-rates needs speculation, and no --synthetic-acceptance-length.")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed {self.seed}: give a whole number from 0 to {2**63 - 1}.")

    @property
    def synthetic(self) -> bool:
        """True if acceptance is synthetic instead of the drafter's own."""
        return self.synthetic_acceptance_length is not None or bool(self.synthetic_acceptance_rates)

    @property
    def offloads(self) -> bool:
        """True if evicted pages are kept in host memory."""
        return self.cpu_offload_gb > 0 or self.cpu_offload_ratio > 0

    @property
    def exchanges_pages(self) -> bool:
        """True if other engines compute prompts for this one, or this one for others."""
        return bool(self.transfer_listen or self.prefill_urls)

    def _check_dtypes(self) -> None:
        object.__setattr__(self, "dtype", DTYPE_ALIASES.get(self.dtype, self.dtype))
        _one_of("--dtype", self.dtype, ("auto", *DTYPES))
        object.__setattr__(self, "kv_cache_dtype", DTYPE_ALIASES.get(self.kv_cache_dtype, self.kv_cache_dtype))
        if self.kv_cache_dtype not in KV_DTYPES:
            raise ConfigError(
                f"--kv-cache-dtype {self.kv_cache_dtype} is not supported; keys and values are kept in the model's "
                "dtype or in e4m3: give auto, fp8 or fp8_e4m3."
            )

    def _check_offload(self) -> None:
        for name in ("cpu_offload_gb", "cpu_offload_ratio"):
            if not 0 <= (value := getattr(self, name)) < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} {value}: give a number from 0 on; 0 offloads nothing.")
        if self.kv_offload_dir is not None and not self.offloads:
            raise ConfigError("--kv-offload-dir: files hold what waits in host memory; give --cpu-offload-gb, too.")
        if not self.kv_offload_dir_gb > 0:
            raise ConfigError(f"--kv-offload-dir-gb {self.kv_offload_dir_gb}: give GiB above 0.")
        if self.offloads and not self.enable_prefix_caching:
            raise ConfigError(
                "--cpu-offload-gb keeps what the prefix cache evicts: leave --no-enable-prefix-caching out."
            )

    def _check_role(self) -> None:
        _one_of("--role", self.role, ("prefill", "decode", "both"))
        _one_of("--transfer-backend", self.transfer_backend, ("tcp", "nixl", "auto"))
        if self.transfer_backend == "nixl" and find_spec("nixl") is None:
            raise ConfigError("--transfer-backend nixl: the package nixl is missing: pip install 'unisono[nixl]'.")
        needed = {
            "prefill": ("--transfer-listen", self.transfer_listen),
            "decode": ("--prefill-url", self.prefill_urls),
        }
        if self.role in needed and not needed[self.role][1]:
            flag = needed[self.role][0]
            raise ConfigError(f"--role {self.role} needs {flag}: tcp://HOST:PORT, or unix:///PATH on one host.")
        if self.role == "prefill" and self.prefill_urls:
            raise ConfigError("--role prefill computes prompts itself: leave --prefill-url out.")
        if self.exchanges_pages and not self.enable_prefix_caching:
            raise ConfigError("Pages of other engines go to the prefix cache: leave --no-enable-prefix-caching out.")
        if not self.transfer_timeout > 0:
            raise ConfigError(f"--transfer-timeout {self.transfer_timeout}: give seconds above 0.")

    def _check_files(self) -> None:
        """Check the contents of directories in flags. Raises ConfigError or CheckpointError."""
        if self.tokenizer is not None and not any(Path(self.tokenizer).glob("*token*")):
            raise ConfigError(f"--tokenizer {self.tokenizer}: there is no tokenizer; give a directory that has one.")
        source = self.generation_config
        if source not in ("auto", "vllm") and not (Path(source) / "generation_config.json").is_file():
            raise ConfigError(
                f"--generation-config {source}: it has no generation_config.json; give auto, vllm or a directory."
            )

    def _check_adapters(self) -> None:
        for name, low, high in (("max_loras", 1, 1024), ("max_lora_rank", 1, 512), ("max_cpu_loras", 1, 1 << 20)):
            if (value := getattr(self, name)) is not None and not low <= value <= high:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: give a whole number from {low} to {high}.")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(f"--max-cpu-loras {self.max_cpu_loras}: give at least --max-loras, {self.max_loras}.")
        if self.lora_modules and not self.enable_lora:
            raise ConfigError("--lora-modules needs --enable-lora.")
        names = [name for name, _ in self.lora_modules]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"--lora-modules names {twice[0]!r} twice: give each adapter a name of its own.")
        if self.lora_dtype not in ("auto", self.dtype):
            raise ConfigError(f"--lora-dtype {self.lora_dtype}: adapters have the model's dtype; give auto.")

    def _check_graphs(self) -> None:
        _one_of("--graph-capture", self.graph_capture, ("start", "lazy"))
        modes = parse_graphs(self.graphs)
        if self.enforce_eager and self.graphs not in ("auto", "off"):
            raise ConfigError(f"--enforce-eager captures no graph, --graphs {self.graphs} does: drop one of them.")
        if self.compile and (self.enforce_eager or set(modes.values()) == {"off"}):
            raise ConfigError("--compile compiles what graphs capture, and graphs are off: drop it, or --graphs off.")
        if self.graph_memory is not None and not self.graph_memory > 0:
            raise ConfigError(f"--graph-memory {self.graph_memory}: give GiB above 0, or --graphs off for none.")


def parse_graphs(text: str) -> dict[str, str]:
    """The graph mode of each program, from "MODE" or "PROGRAM=MODE,…"; default: auto. Raises ConfigError."""
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
    devices: int | None = None
    """Number of GPUs from ``device`` on; None on a CPU."""
    capability: tuple[int, int] | None = None
    """Compute capability of the GPU."""

    @staticmethod
    def detect(device: str) -> Hardware:
        """The hardware of ``--device``; auto: the first GPU or the CPU. Raises ConfigError for an absent GPU."""
        import torch

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
            left = torch.cuda.device_count() - index
            capability = properties.major, properties.minor
            return Hardware(torch.device("cuda", index), properties.name, properties.total_memory, left, capability)
        return Hardware(torch.device("cpu"), "CPU", 0)


class CheckpointFacts(Protocol):
    """The properties of a checkpoint that :func:`resolve` reads (models/load/checkpoint.py)."""

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

    kv_dtype: dtype of the KV cache. graphs: mode of each program. graph_bytes: memory for graphs, once it is known.
    speculative: None if nothing drafts. forced_drafts: numbers of forced tokens that a round may propose, ascending;
    empty: none (``max_forced_tokens``).
    """

    requested: EngineConfig
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_mixed_chunk: bool
    attention_backend: str
    graphs: Mapping[str, str] = field(default_factory=dict)
    graph_bytes: int = 0
    speculative: SpeculativeConfig | None = None
    forced_drafts: tuple[int, ...] = ()
    decisions: tuple[Decision, ...] = ()

    def decide(self, name: str, value: object, reason: str, **changes: Any) -> ResolvedConfig:
        """A copy with one more decision and the changed fields."""
        decision = Decision(name, str(value), reason)
        return dataclasses.replace(self, decisions=(*self.decisions, decision), **changes)

    @property
    def encoder_cache_bytes(self) -> int | None:
        """``mm_encoder_cache_gb`` in bytes."""
        limit = self.requested.mm_encoder_cache_gb
        return None if limit is None else int(limit * (1 << 30))

    def explain(self) -> dict[str, Any]:
        """The resolved settings and every decision, as JSON-ready data."""
        settings = {
            **vars(self.requested),
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "kv_cache_dtype": str(self.kv_dtype).removeprefix("torch."),
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "enable_mixed_chunk": self.enable_mixed_chunk,
            "attention_backend": self.attention_backend,
            "graphs": dict(self.graphs),
            "graph_bytes": self.graph_bytes,
            "lora_modules": [{"name": name, "path": path} for name, path in self.requested.lora_modules],
            "speculative": dataclasses.asdict(self.speculative) if self.speculative else None,
            "synthetic_acceptance_rates": list(self.requested.synthetic_acceptance_rates),
        }
        return {"settings": settings, "decisions": [dataclasses.asdict(d) for d in self.decisions]}


def resolve(config: EngineConfig, hardware: Hardware, checkpoint: CheckpointFacts) -> ResolvedConfig:
    """Resolve every ``auto``. Raises ConfigError for a flag that this checkpoint or machine cannot honour."""
    import torch

    gpu = hardware.device.type == "cuda"
    check_visible(config.tensor_parallel_size, hardware.devices, hardware.device)
    decisions: list[Decision] = []

    def resolve_auto(name: str, requested: Any, value: Any, reason: str) -> Any:
        if requested not in (None, "auto"):
            return requested
        decisions.append(Decision(name, str(value).removeprefix("torch."), reason))
        return value

    device = resolve_auto("device", config.device, str(hardware.device), f"found: {hardware.name}")
    dtype = resolve_auto("dtype", config.dtype, *_auto_dtype(gpu, checkpoint.dtype or torch.float32))
    dtype = dtype_of(dtype) if isinstance(dtype, str) else dtype
    limit = checkpoint.config.max_positions
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is above the model's context of {limit} tokens "
            "(config.json, or max_seq_length of sentence_bert_config.json). Give at most that."
        )
    kind, seqs, tokens = GPU_SIZES if gpu else CPU_SIZES
    reason = f"the default on {kind}"
    if checkpoint.config.whole_text and tokens < (config.max_model_len or limit):
        tokens, reason = config.max_model_len or limit, "each prompt is computed in one pass: its tokens see later ones"
    return ResolvedConfig(
        requested=config,
        device=torch.device(device),
        dtype=dtype,
        kv_dtype=resolve_auto("kv_cache_dtype", _kv_dtype(config, dtype, hardware), dtype, "the model's"),
        max_model_len=resolve_auto("max_model_len", config.max_model_len, limit, "the model's context"),
        max_num_seqs=resolve_auto("max_num_seqs", config.max_num_seqs, seqs, f"the default on {kind}"),
        max_num_batched_tokens=resolve_auto("max_num_batched_tokens", config.max_num_batched_tokens, tokens, reason),
        enable_mixed_chunk=resolve_auto(
            "enable_mixed_chunk",
            config.enable_mixed_chunk,
            gpu,
            "weights are read once for prompts and for requests that run" if gpu else "nothing is measured on a CPU",
        ),
        attention_backend=resolve_auto(
            "attention_backend", config.attention_backend, "triton", "exact at any width, batch and chunking"
        ),
        graphs=dict.fromkeys(GRAPH_PROGRAMS, "off") if config.enforce_eager else parse_graphs(config.graphs),
        speculative=config.speculative,
        decisions=tuple(decisions),
    )


def _auto_dtype(gpu: bool, stored: torch.dtype) -> tuple[torch.dtype, str]:
    """The serving dtype of a checkpoint of dtype ``stored``, and the reason."""
    import torch

    if not gpu:
        name = str(stored).removeprefix("torch.")
        return torch.float32, f"the CPU computes in float32; the checkpoint holds {name}"
    if stored is torch.float32:
        return torch.bfloat16, "the checkpoint holds float32; bfloat16 halves what each step reads"
    return stored, "the checkpoint's own"


def _kv_dtype(config: EngineConfig, dtype: torch.dtype, hardware: Hardware) -> torch.dtype | None:
    """The dtype of the KV cache; None if the flag is auto. Raises ConfigError."""
    import torch

    requested = config.kv_cache_dtype
    if requested in DTYPES and dtype_of(requested) != dtype:
        model = str(dtype).removeprefix("torch.")
        raise ConfigError(f"--kv-cache-dtype {requested}: the model has {model}; give auto, {model} or fp8.")
    if requested.startswith("fp8") and hardware.capability is not None and hardware.capability < (8, 9):
        has = ".".join(map(str, hardware.capability))
        raise ConfigError(f"--kv-cache-dtype {requested}: this GPU has compute capability {has}, and e4m3 needs 8.9.")
    return torch.float8_e4m3fn if requested.startswith("fp8") else None if requested == "auto" else dtype


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag} {value!r} is unknown; choose one of {', '.join(allowed)}.")
