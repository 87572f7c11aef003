"""Flags of every command that starts an engine, in groups. ``cli/main.py`` adds them to its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from unisono.config import catalog


def cache_flags(
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            help="Dtype of keys and values: auto (the model's), fp8 or fp8_e4m3 (half the memory and traffic)."
        ),
    ] = "auto",
    gpu_memory_utilization: Annotated[float, typer.Option(help="Fraction of the GPU's memory to use.")] = 0.9,
    snapshot_share: Annotated[
        float, typer.Option(help="Models with recurrent layers: fraction of the KV cache for prefix snapshots.")
    ] = 0.1,
    snapshot_points: Annotated[
        int,
        typer.Option(help="Models with recurrent layers: most snapshots inside a new prompt; each costs a pass."),
    ] = 2,
    mm_encoder_cache_gb: Annotated[
        float | None, typer.Option(help="Cache of encoded images on the device, GiB; default: 1, on a CPU 0.25.")
    ] = None,
    num_pages: Annotated[int | None, typer.Option(help="KV cache pages of 16 tokens; default: as many as fit.")] = None,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Reuse KV pages of common prefixes."),
    ] = True,
    enable_sleep_mode: Annotated[
        bool, typer.Option(help="Let /sleep free the memory of weights and KV cache; wake gets the same addresses.")
    ] = False,
) -> None:
    """Flags of the KV cache: fields of ``unisono.config.EngineConfig``."""


def scheduling_flags(
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Requests that run at once; default: 256, on a CPU 16.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of prompt tokens per pass; default: 8192, on a CPU 512.")
    ] = None,
    max_stall_ms: Annotated[
        float, typer.Option(help="Longest pause of running requests for prompt passes, milliseconds.")
    ] = 50.0,
    max_forced_tokens: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of forced tokens (the grammar's only continuation) drafted per round; 0: none."
        ),
    ] = None,
    enable_mixed_chunk: Annotated[
        bool | None,
        typer.Option(
            "--enable-mixed-chunk/--no-enable-mixed-chunk",
            help="Decode running requests inside prompt passes while rounds do not draft; default: on with a GPU.",
        ),
    ] = None,
    scheduling_policy: Annotated[
        str, typer.Option(help="Order of waiting requests: fcfs, or priority (lower values first).")
    ] = "fcfs",
) -> None:
    """Flags of scheduling: fields of ``unisono.config.EngineConfig``."""


def graph_flags(
    attention_backend: Annotated[
        str, typer.Option(help=f"Attention kernels: auto, {', '.join(catalog.attention.names)}.")
    ] = "auto",
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="Capture no graphs; every pass runs eagerly.")
    ] = False,
    graphs: Annotated[
        str,
        typer.Option(help="Kind of graphs: auto, full, segmented or off; or per program: extend=segmented,round=full."),
    ] = "auto",
    graph_capture: Annotated[
        str, typer.Option(help="start: capture graphs before the first request; lazy: each before its first pass.")
    ] = "start",
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile passes with torch.compile before capturing them.")
    ] = False,
    graph_memory: Annotated[
        float | None, typer.Option(help="Memory for graphs, GiB; default: a fraction of the free memory.")
    ] = None,
) -> None:
    """Flags of graphs and kernels: fields of ``unisono.config.EngineConfig``."""


def feature_flags(
    logprobs_mode: Annotated[
        str,
        typer.Option(
            help="raw_logprobs, raw_logits: of the model's logits; processed_logprobs, processed_logits: of the "
            "distribution that is sampled."
        ),
    ] = "raw_logprobs",
    max_logprobs: Annotated[
        int, typer.Option(help="Maximum number of log-probabilities per token; -1: no limit.")
    ] = 20,
    enable_prompt_embeds: Annotated[
        bool, typer.Option("--enable-prompt-embeds", help="Accept prompt_embeds and embedding_overrides.")
    ] = False,
    enable_return_hidden_states: Annotated[
        bool, typer.Option("--enable-return-hidden-states", help="Accept return_hidden_states.")
    ] = False,
    enable_return_routed_experts: Annotated[
        bool, typer.Option("--enable-return-routed-experts", help="Accept return_routed_experts.")
    ] = False,
) -> None:
    """Flags of request features: fields of ``unisono.config.EngineConfig``."""


def memory_flags(
    tensor_parallel_size: Annotated[
        int,
        typer.Option(help="GPUs that hold one model; the text is the same for every number (docs/guide/scale.md)."),
    ] = 1,
    enable_expert_parallel: Annotated[
        bool,
        typer.Option(
            "--enable-expert-parallel", help="Place whole experts on the GPUs, instead of slices of every expert."
        ),
    ] = False,
    expert_placement: Annotated[
        str | None, typer.Option(metavar="FILE", help="Order of experts on the GPUs, of `unisono place-experts`.")
    ] = None,
    enable_dp_attention: Annotated[
        bool,
        typer.Option("--enable-dp-attention", help="DP attention (MLA): each GPU holds the pages of its own requests."),
    ] = False,
    tp_reduce: Annotated[
        str,
        typer.Option(
            help="gather: the same text as with one GPU; ordered: faster, but the text depends on the number of GPUs."
        ),
    ] = "gather",
    cpu_offload_gb: Annotated[
        float, typer.Option(help="Host memory for evicted KV pages, GiB; weights stay on the device.")
    ] = 0.0,
    cpu_offload_ratio: Annotated[
        float,
        typer.Option(
            help="Host memory for evicted KV pages, as a multiple of the device's pages; --cpu-offload-gb overrides it."
        ),
    ] = 0.0,
    kv_offload_dir: Annotated[
        str | None, typer.Option(help="Directory for offloaded KV pages; files outlive the engine.")
    ] = None,
    kv_offload_dir_gb: Annotated[float, typer.Option(help="Maximum size of --kv-offload-dir, GiB.")] = 64.0,
    role: Annotated[
        str,
        typer.Option(
            help="prefill: compute prompts for other engines; decode: let prefill engines compute them; both."
        ),
    ] = "both",
    transfer_listen: Annotated[
        str | None, typer.Option(help="Address that a prefill engine listens on: tcp://HOST:PORT or unix:///PATH.")
    ] = None,
    prefill_urls: Annotated[
        str | None, typer.Option("--prefill-url", help="Addresses of prefill engines, separated by commas.")
    ] = None,
    transfer_backend: Annotated[
        str, typer.Option(help="Transport of KV pages: tcp, nixl, or auto (nixl if both ends have it).")
    ] = "tcp",
    transfer_timeout: Annotated[
        float,
        typer.Option(help="Seconds without a message from a prefill engine before this engine computes the prompts."),
    ] = 10.0,
) -> None:
    """Flags of several GPUs, host memory, and engines that share the work: fields of ``EngineConfig``."""


def adapter_flags(
    enable_lora: Annotated[bool, typer.Option("--enable-lora", help="Accept LoRA adapters.")] = False,
    max_loras: Annotated[int, typer.Option(help="Adapters on the device at once.")] = 1,
    max_lora_rank: Annotated[int, typer.Option(help="Maximum rank of an adapter; memory is reserved for it.")] = 16,
    max_cpu_loras: Annotated[int | None, typer.Option(help="Adapters in host memory; default: --max-loras.")] = None,
    lora_modules: Annotated[
        list[str] | None, typer.Option(help='Adapters to load: name=path …, or JSON {"name": …, "path": …}.')
    ] = None,
    lora_dtype: Annotated[str, typer.Option(help="Dtype of adapters: auto, the model's.")] = "auto",
) -> None:
    """Flags of adapters: fields of ``EngineConfig``."""


def model_flags(
    dtype: Annotated[
        str, typer.Option(help="Dtype of weights and activations: auto, bfloat16, float16 (half) or float32.")
    ] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="Context length: tokens of prompt and output together; default: the model's.")
    ] = None,
    load_format: Annotated[
        str, typer.Option(help="auto, or dummy: random weights, which need config.json only.")
    ] = "auto",
    quantization: Annotated[
        str | None,
        typer.Option(
            help=f"Weight format: {', '.join(catalog.formats.names)}; default: the checkpoint's. "
            "fp8 quantises plain weights; gguf keeps integers of a GGUF file packed."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda or cuda:N.")] = "auto",
    tokenizer: Annotated[str | None, typer.Option(help="Directory of the tokenizer; default: the checkpoint.")] = None,
    generation_config: Annotated[
        str, typer.Option(help="Sampling defaults: auto (the checkpoint's), vllm (neutral ones) or a directory.")
    ] = "auto",
    revision: Annotated[str | None, typer.Option(help="Revision of a checkpoint on the Hugging Face hub.")] = None,
    hf_overrides: Annotated[
        str | None, typer.Option(help='Overrides of config.json, JSON: {"rope_theta": 1000000}.')
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="YAML file of flags; flags on the command line take precedence.")
    ] = None,
) -> None:
    """Flags of the model and its files: fields of ``EngineConfig``, and the sources of their values."""


def speculative_flags(
    speculative_config: Annotated[
        str | None,
        typer.Option(help='Drafter, JSON: {"method": …, "model": PATH, "num_speculative_tokens": k, …}.'),
    ] = None,
    speculative_method: Annotated[
        str | None, typer.Option(help=f"Drafting method: {', '.join(catalog.drafters.names)}.")
    ] = None,
    speculative_model: Annotated[str | None, typer.Option(help="Draft model: a checkpoint directory.")] = None,
    num_speculative_tokens: Annotated[int | None, typer.Option(help="Drafts per round (k).")] = None,
    speculative_topk: Annotated[int | None, typer.Option(help="Tree of drafts: children per node.")] = None,
    speculative_tree_nodes: Annotated[int | None, typer.Option(help="Tree of drafts: nodes.")] = None,
    speculative_draft_quantization: Annotated[
        str | None, typer.Option(help="Weight format of the draft model: auto, fp8 or none.")
    ] = None,
) -> None:
    """Flags of speculation: parts of ``EngineConfig.speculative``."""


ENGINE_FLAGS = (
    model_flags,
    cache_flags,
    scheduling_flags,
    graph_flags,
    feature_flags,
    memory_flags,
    adapter_flags,
    speculative_flags,
)
"""Every group, in the order of ``--help=all``."""
