"""Names of settings in vLLM and SGLang, in one table for the command line and for ``LLM``'s keywords.

``--tensor-parallel-size 1`` and ``LLM(tensor_parallel_size=1)`` are the same entry. An entry maps a name to a flag of
Unisono, states that some or all of its values change nothing, or gives the reason of its refusal and the nearest
alternative. ``cli/aliases.py`` and ``entrypoints`` read it; ``docs/reference/flags.md`` prints it (a test compares
them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.types import ConfigError

SHORT = {
    "-dp": "--data-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}
"""Short names and their long forms."""

RENAMED = {
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--context-length": "--max-model-len",
    "--disaggregation-transfer-backend": "--transfer-backend",
    "--dp": "--data-parallel-size",
    "--dp-size": "--data-parallel-size",
    "--hicache-ratio": "--cpu-offload-ratio",
    "--hicache-size": "--cpu-offload-gb",
    "--json-model-override-args": "--hf-overrides",
    "--kv-offloading-size": "--cpu-offload-gb",
    "--limit-mm-data-per-request": "--limit-mm-per-prompt",
    "--lora-paths": "--lora-modules",
    "--max-loaded-loras": "--max-cpu-loras",
    "--max-loras-per-batch": "--max-loras",
    "--max-running-requests": "--max-num-seqs",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--num-gpu-blocks-override": "--num-pages",
    "--random-seed": "--seed",
    "--speculative-draft-model-path": "--speculative-model",
    "--speculative-num-steps": "--num-speculative-tokens",
    "--tokenizer-path": "--tokenizer",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "--uvicorn-log-level": "--log-level",
}
"""Settings with a value and their equivalents."""

SWITCHES = {
    "--disable-cuda-graph": "--enforce-eager",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--enable-hierarchical-cache": "--cpu-offload-ratio=2",
    "--enable-memory-saver": "--enable-sleep-mode",
    "--enable-torch-compile": "--compile",
    "--no-enforce-eager": "",
}
"""Settings without a value and their equivalents; an empty one is the default behaviour."""

_GRAMMARS = ("auto", "llguidance", "guidance", "xgrammar")
_LLGUIDANCE = "the grammar engine is llguidance, which also reads xgrammar's structural tags"
_RANKS = "--tensor-parallel-size divides a model among the GPUs of one machine (docs/guide/scale.md)"
_CONTEXT = f"a context is not divided among GPUs; {_RANKS}"
_STAGES = f"layers are not divided among GPUs; {_RANKS}"
_MACHINES = (
    f"{_RANKS}, and --data-parallel-size with --distributed-executor-backend ray puts engines on several machines"
)
_EMBEDS = "the task (text, embeddings or classification) follows from the checkpoint (docs/guide/embed.md)"
_ONE_ENGINE = "only `unisono serve` runs several engines; other commands and LLM run one"
_EXPERTS = "--enable-expert-parallel divides experts among the ranks of --tensor-parallel-size"

ACCEPTED: dict[str, tuple[tuple[str, ...], str]] = {
    "--api-server-count": (("1",), "one process serves the API"),
    "--block-size": (("16",), "pages of the KV cache have 16 tokens"),
    "--chat-template-content-format": (("auto", "string"), "templates get message contents as text"),
    "--convert": (("auto", "none", "embed", "classify", "reward"), _EMBEDS),
    "--data-parallel-size": (("1",), _ONE_ENGINE),
    "--dcp-size": (("1",), _CONTEXT),
    "--decode-context-parallel-size": (("1",), _CONTEXT),
    "--distributed-executor-backend": (("uni", "mp"), _ONE_ENGINE),
    "--ep": (("1",), _EXPERTS),
    "--ep-size": (("1",), _EXPERTS),
    "--grammar-backend": (_GRAMMARS, _LLGUIDANCE),
    "--guided-decoding-backend": (_GRAMMARS, _LLGUIDANCE),
    "--kv-offloading-backend": (("native",), "host memory is the engine's own; --cpu-offload-gb sets it"),
    "--nnodes": (("1",), _MACHINES),
    "--node-rank": (("0",), _MACHINES),
    "--page-size": (("16",), "pages of the KV cache have 16 tokens"),
    "--pipeline-parallel-size": (("1",), _STAGES),
    "--pp": (("1",), _STAGES),
    "--pp-size": (("1",), _STAGES),
    "--preemption-mode": (("recompute",), "preempted requests are recomputed"),
    "--response-role": (("assistant",), "answers have the role assistant"),
    "--runner": (("auto", "generate", "pooling"), _EMBEDS),
    "--stream-interval": (("1",), "every round's tokens are streamed at once"),
    "--structured-outputs-config": (tuple(f'{{"backend": "{name}"}}' for name in _GRAMMARS), _LLGUIDANCE),
    "--task": (("auto", "generate", "embed", "embedding", "classify", "score", "reward"), _EMBEDS),
    "--tokenizer-mode": (("auto", "hf"), "tokenizers are read through transformers"),
}
"""Settings with a value of which only these values can be honoured, and the reason."""

_ALWAYS_CHUNKED = "prompts are always computed in chunks, as large as --max-stall-ms allows; the text is the same"
_OWN_GRAPHS = "the sizes of graphs follow from --max-num-seqs and --graph-memory; --graphs sets the mode"
_OWN_COPIES = "pages are gathered on the GPU and copied on a separate stream"
_ALWAYS_METRICS = "/metrics always has them"

NOTED_VALUES = {
    "--cuda-graph-bs": _OWN_GRAPHS,
    "--cuda-graph-max-bs": _OWN_GRAPHS,
    "--cuda-graph-sizes": _OWN_GRAPHS,
    "--decode-log-interval": "a line is logged every 10 s while there is work",
    "--hicache-io-backend": _OWN_COPIES,
    "--hicache-mem-layout": _OWN_COPIES,
    "--hicache-write-policy": "a page is written to host memory when the prefix cache evicts it",
    "--log-level-http": "requests that fail are logged, others are not",
    "--lora-backend": "there is one set of adapter kernels, batch-invariant like all others",
    "--lora-target-modules": "every linear layer has room for adapters",
    "--mm-attention-backend": "the vision tower has one attention backend, batch-invariant like the text model's",
    "--mm-encoder-attn-backend": "the vision tower has one attention backend, batch-invariant like the text model's",
    "--mm-processor-cache-type": "preprocessed images are cached in the API process, up to --mm-processor-cache-gb",
    "--max-log-len": "prompts are never logged",
    "--max-prefill-tokens": "--max-num-batched-tokens bounds a prompt pass",
    "--max-seq-len-to-capture": _OWN_GRAPHS,
    "--sampling-backend": "there is one sampler, and it is exact",
    "--schedule-policy": "cached prefixes are used in any order of requests; --scheduling-policy sets the order",
    "--schedule-conservativeness": "a request is admitted if pages for its prompt are free; preemption changes no byte",
    "--swap-space": "nothing is swapped: preempted requests are recomputed, with the same bytes",
    "--torch-compile-max-bs": _OWN_GRAPHS,
}
"""Settings with a value that change nothing, and what happens instead; a note reports it."""

NOTED_SWITCHES = {
    "--async-scheduling": "host and device always overlap",
    "--calculate-kv-scales": "an fp8 KV cache has a scale for each token and head, made when it is written",
    "--disable-cascade-attn": "there is no cascade attention",
    "--disable-cuda-graph-padding": "graphs are captured for buckets of rows; padding changes no byte",
    "--disable-custom-all-reduce": "ranks gather and never reduce",
    "--disable-frontend-multiprocessing": "the engine always runs in a separate process",
    "--disable-log-requests": "requests are not logged unless they fail",
    "--disable-log-stats": _ALWAYS_METRICS,
    "--disable-overlap-schedule": "host and device always overlap; the text is the same",
    "--disable-uvicorn-access-log": "there is no access log",
    "--enable-chunked-prefill": _ALWAYS_CHUNKED,
    "--enable-deterministic-inference": "inference is always deterministic",
    "--fully-sharded-loras": "no sum is split among ranks: each has A whole and its part of B",
    "--enable-log-requests": "requests that fail are logged, and /metrics counts all",
    "--no-enable-log-requests": "requests that fail are logged, and /metrics counts all",
    "--enable-metrics": _ALWAYS_METRICS,
    "--enable-p2p-check": "ranks access each other's memory if torch reports peer access, otherwise they use NCCL",
    "--enable-server-load-tracking": "the load is always tracked",
    "--is-embedding": "/v1/embeddings and text routes are always served (docs/guide/embed.md)",
    "--enable-multimodal": "models with a vision tower always accept images",
    "--skip-mm-profiling": "memory of the tower's passes is measured with the others",
    "--no-async-scheduling": "host and device always overlap; the text is the same",
    "--no-enable-chunked-prefill": _ALWAYS_CHUNKED,
    "--no-trust-remote-code": "code of a checkpoint is never run",
    "--use-tqdm-on-load": "the stages of a start are shown",
    "--no-use-tqdm-on-load": "if standard error is not a terminal, the stages of a start are printed as plain lines",
    "--skip-server-warmup": "graphs are captured before the server is ready",
}
"""Settings without a value that change nothing, and what happens instead."""

_POOLING = "the checkpoint's 1_Pooling/config.json sets the pooling (docs/guide/embed.md)"

REFUSED = {
    "--completion-template": "there are no completion templates; build the prompt in the client",
    "--compilation-config": "graphs are set by --graphs, --graph-memory and --compile",
    "--cpu-offload": "weights are not offloaded; --quantization fp8 makes them smaller",
    "--disable-sliding-window": "windows are the model's; --max-model-len bounds the context",
    "--disaggregation-bootstrap-port": "a prefill engine listens at --transfer-listen",
    "--disaggregation-ib-device": "with --transfer-backend nixl UCX picks devices; UCX_NET_DEVICES names them",
    "--dist-init-addr": _MACHINES,
    "--enable-force-include-usage": "clients request usage with stream_options.include_usage",
    "--enable-mm-embeds": "image embeddings are not supported; send images",
    "--interleave-mm-strings": "images are always placed at their content parts",
    "--headless": _MACHINES,
    "--hicache-storage-backend": "--kv-offload-dir DIR keeps pages in files",
    "--hf-token": "the token is read from the environment (HF_TOKEN), because other users can see flags",
    "--kv-cache-memory-bytes": "the KV cache gets what --gpu-memory-utilization leaves; --num-pages bounds it",
    "--log-config-file": "logging is set by --log-level",
    "--logits-processors": "write a feature (docs/extend/feature.md)",
    "--max-total-tokens": "the KV cache gets what --gpu-memory-utilization leaves; --num-pages bounds it",
    "--middleware": "no code is loaded into the server; put a proxy in front of it",
    "--override-pooler-config": _POOLING,
    "--pooler-config": _POOLING,
    "--skip-tokenizer-init": "prompts may be token ids even with a tokenizer; leave the flag out",
    "--trust-remote-code": (
        "code of a checkpoint is never run. The architectures of docs/reference/models.md need none; for others, "
        "write a family (docs/extend/model.md)"
    ),
    "--uds": "the server listens on --host and --port",
}
"""Settings that are refused, and the reason or the nearest alternative."""

ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
"""``kv_role`` of vLLM's ``--kv-transfer-config`` -> role."""

ALGORITHMS = {
    "NEXTN": "mtp", "MTP": "mtp", "EAGLE": "eagle", "EAGLE3": "eagle3", "STANDALONE": "standalone", "NGRAM": "ngram",
    "DFLASH": "dflash", "DSPARK": "dspark",
    "NONE": "none",
}  # fmt: skip
"""Values of ``--speculative-algorithm`` -> speculative method."""

MAMBA_STRATEGIES = ("auto", "no_buffer", "extra_buffer", "extra_buffer_lazy")

MAMBA_NOTE = (
    "no effect. A recurrent layer keeps one state per request and a ring of the newest inputs, so "
    "speculation needs no extra states; prefixes keep snapshots at aligned positions."
)


def check_accepted(flag: str, value: str, shown: Callable[[str], str] = str) -> None:
    """Raise ConfigError unless ``value`` of ``flag`` is among the ACCEPTED. shown: spells a flag as the caller does."""
    values, reason = ACCEPTED[flag]
    if value not in values:
        choice = " or ".join(one or '""' for one in values)
        raise ConfigError(f"{shown(flag)} {value}: {reason}; give {choice} or leave it out.")


def refuse(flag: str, shown: Callable[[str], str] = str) -> None:
    """Raise ConfigError with the reason why ``flag`` is REFUSED."""
    raise ConfigError(f"{shown(flag)} is not supported: {REFUSED[flag]}.")


def algorithm(flag: str, value: Any) -> str:
    """The speculative method of SGLang's algorithm ``value``. Raises ConfigError."""
    if str(value).upper() not in ALGORITHMS:
        raise ConfigError(f"{flag} {value!r} is unknown; choose one of {', '.join(ALGORITHMS)}.")
    return ALGORITHMS[str(value).upper()]


def markdown() -> str:
    """The table of ``docs/reference/flags.md``."""
    rows = ["| Name | Here |", "|---|---|"]
    same = {**SHORT, **RENAMED, **{flag: ours or "no effect: this is the default" for flag, ours in SWITCHES.items()}}
    rows += [f"| `{flag}` | {f'`{ours}`' if ours.startswith('-') else ours} |" for flag, ours in sorted(same.items())]
    for flag, (values, reason) in sorted(ACCEPTED.items()):
        shown = ", ".join(f"`{value}`" if value else "empty" for value in values)
        rows.append(f"| `{flag}` | only {shown}: {reason} |")
    for flag, reason in sorted({**NOTED_VALUES, **NOTED_SWITCHES}.items()):
        rows.append(f"| `{flag}` | no effect, with a note: {reason} |")
    rows += [f"| `{flag}` | refused: {reason} |" for flag, reason in sorted(REFUSED.items())]
    return "\n".join(rows)
