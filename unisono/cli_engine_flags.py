"""The flags of every command that starts an engine, by group; ``cli.py`` gives them to its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from unisono import catalog


def engine_flags(
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 (half) or float32.")] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Of keys and values: auto (the model's), fp8 or fp8_e4m3: half the memory and traffic.")
    ] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Context: prompt and output together, in tokens.")] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the GPU's memory to use.")] = 0.9,
    snapshot_share: Annotated[
        float, typer.Option(help="Of models with recurrent layers: share of the KV cache for prefix snapshots.")
    ] = 0.1,
    mm_encoder_cache_gb: Annotated[
        float | None, typer.Option(help="GiB that encoded pictures may take on the device; default: 1, on a CPU 0.25.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests that run at once.")] = None,
    num_pages: Annotated[int | None, typer.Option(help="KV pages of 16 tokens; default: what fits.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Prompt tokens per pass.")] = None,
    max_stall_ms: Annotated[
        float, typer.Option(help="Milliseconds of prompt passes between two rounds of running requests.")
    ] = 50.0,
    max_forced_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens that a grammar leaves no choice about, drafted in a round at most; 0: none."),
    ] = None,
    enable_mixed_chunk: Annotated[
        bool | None,
        typer.Option(
            "--enable-mixed-chunk/--no-enable-mixed-chunk",
            help="Running requests decode in the prompt passes of others, where their rounds would draft nothing; "
            "default: on a GPU.",
        ),
    ] = None,
    load_format: Annotated[str, typer.Option(help="auto, or dummy: random weights; needs config.json only.")] = "auto",
    quantization: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(catalog.formats.names)}; default: the checkpoint's. fp8 quantises a plain one."),
    ] = None,
    attention_backend: Annotated[str, typer.Option(help=f"auto, {', '.join(catalog.attention.names)}.")] = "auto",
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="Capture no graph.")] = False,
    graphs: Annotated[
        str, typer.Option(help="auto, full, segmented or off; or per program: extend=segmented,round=full.")
    ] = "auto",
    compile: Annotated[bool, typer.Option("--compile", help="torch.compile pieces of captured passes.")] = False,
    graph_memory: Annotated[float | None, typer.Option(help="GiB that graphs may take.")] = None,
    logprobs_mode: Annotated[
        str, typer.Option(help="raw_logprobs: the model's own; processed_logprobs: what tokens are drawn from.")
    ] = "raw_logprobs",
    max_logprobs: Annotated[int, typer.Option(help="Log-probabilities per token at most; -1: any number.")] = 20,
    scheduling_policy: Annotated[str, typer.Option(help="fcfs, or priority: lower values first.")] = "fcfs",
    enable_prompt_embeds: Annotated[
        bool, typer.Option("--enable-prompt-embeds", help="Serve prompt_embeds and embedding_overrides.")
    ] = False,
    enable_return_hidden_states: Annotated[
        bool, typer.Option("--enable-return-hidden-states", help="Serve return_hidden_states.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    enable_prefix_caching: Annotated[
        bool, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Reuse prompts' KV pages.")
    ] = True,
) -> None:
    """The flags of every command that starts an engine: fields of ``unisono.config.EngineConfig``."""


def memory_flags(
    tensor_parallel_size: Annotated[
        int, typer.Option(help="GPUs that hold the model together (docs/scale.md); the same text for every number.")
    ] = 1,
    enable_expert_parallel: Annotated[
        bool, typer.Option("--enable-expert-parallel", help="Of several GPUs each holds some experts whole.")
    ] = False,
    tp_reduce: Annotated[
        str, typer.Option(help="gather: the text of one GPU. ordered: faster; another text for each number of GPUs.")
    ] = "gather",
    cpu_offload_gb: Annotated[
        float, typer.Option(help="GiB of host memory for KV pages that the prefix cache evicts (weights stay).")
    ] = 0.0,
    cpu_offload_ratio: Annotated[
        float, typer.Option(help="The same as a multiple of the device's KV pages; --cpu-offload-gb wins.")
    ] = 0.0,
    kv_offload_dir: Annotated[
        str | None, typer.Option(help="Directory where pages in host memory are written, too; they outlive the engine.")
    ] = None,
    kv_offload_dir_gb: Annotated[float, typer.Option(help="GiB of its files, at most.")] = 64.0,
    role: Annotated[
        str, typer.Option(help="prefill or decode: prompts and rounds on engines of their own; both.")
    ] = "both",
    transfer_listen: Annotated[
        str | None, typer.Option(help="Where a prefill engine listens: tcp://HOST:PORT or unix:///PATH.")
    ] = None,
    prefill_urls: Annotated[
        str | None, typer.Option("--prefill-url", help="Where prefill engines listen; several with commas between.")
    ] = None,
    transfer_backend: Annotated[
        str, typer.Option(help="What carries pages between hosts: tcp, nixl, or auto: nixl where both ends have it.")
    ] = "tcp",
    transfer_timeout: Annotated[
        float, typer.Option(help="Seconds without news of a prefill engine, after which prompts are computed here.")
    ] = 10.0,
) -> None:
    """The same, of more than one GPU's memory, and of engines that share the work."""


def adapter_flags(
    enable_lora: Annotated[bool, typer.Option("--enable-lora", help="Serve adapters (LoRA).")] = False,
    max_loras: Annotated[int, typer.Option(help="Adapters on the device at once.")] = 1,
    max_lora_rank: Annotated[int, typer.Option(help="Of an adapter, at most; memory is taken for that.")] = 16,
    max_cpu_loras: Annotated[
        int | None, typer.Option(help="Adapters in memory of the host; default: --max-loras.")
    ] = None,
    lora_modules: Annotated[
        list[str] | None, typer.Option(help='Adapters to load: name=path …, or JSON {"name": …, "path": …}.')
    ] = None,
    lora_dtype: Annotated[str, typer.Option(help="auto: adapters have the model's dtype.")] = "auto",
) -> None:
    """The flags of every engine that say what adapters it serves."""


def model_flags(
    tokenizer: Annotated[
        str | None, typer.Option(help="Directory of the tokenizer; default: the checkpoint's.")
    ] = None,
    generation_config: Annotated[
        str, typer.Option(help="Sampling defaults: auto (the checkpoint's), vllm (neutral ones) or a directory.")
    ] = "auto",
    revision: Annotated[str | None, typer.Option(help="Of a checkpoint on the Hugging Face hub.")] = None,
    config: Annotated[str | None, typer.Option(help="YAML file of flags; the command line wins.")] = None,
) -> None:
    """The flags of every engine that say what the model is made of."""


def speculative_flags(
    speculative_config: Annotated[
        str | None, typer.Option(help='JSON: {"method": …, "model": PATH, "num_speculative_tokens": k, …}.')
    ] = None,
    speculative_method: Annotated[
        str | None, typer.Option(help=f"Short for its method: {', '.join(catalog.drafters.names)}.")
    ] = None,
    speculative_model: Annotated[str | None, typer.Option(help="Short for its model: a checkpoint directory.")] = None,
    num_speculative_tokens: Annotated[int | None, typer.Option(help="Short for its k: drafts per round.")] = None,
    speculative_topk: Annotated[int | None, typer.Option(help="Short for its topk: children of a tree's node.")] = None,
    speculative_tree_nodes: Annotated[
        int | None, typer.Option(help="Short for its num_draft_tokens: nodes of a tree of drafts.")
    ] = None,
    speculative_draft_quantization: Annotated[
        str | None, typer.Option(help="Short for its draft_quantization: auto, fp8 or none.")
    ] = None,
) -> None:
    """The flags of every engine that say how drafts are made."""
