"""Names of settings in vLLM and SGLang, in one table for the command line and for ``LLM``'s keywords.

``--tensor-parallel-size 1`` and ``LLM(tensor_parallel_size=1)`` are the same entry. An entry maps a name to a flag of
Unisono, states that some or all of its values change nothing, or gives the reason of its refusal and the nearest
alternative. ``cli/aliases.py`` and ``entrypoints`` read it; ``docs/reference/flags.md`` prints it (a test compares
them).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from typing import Any

from unisono.config.flag_effects import NOTED_SWITCHES, NOTED_VALUES, REFUSED
from unisono.types import ConfigError

SHORT = {
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-dcp": "--decode-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpb": "--data-parallel-backend",
    "-ep": "--enable-expert-parallel",
    "-O": "--compilation-config",
    "-pcp": "--prefill-context-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}
"""Short names and their long forms."""

RENAMED = {
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--context-length": "--max-model-len",
    "--data-parallel-backend": "--distributed-executor-backend",
    "--disaggregation-transfer-backend": "--transfer-backend",
    "--dp": "--data-parallel-size",
    "--dp-size": "--data-parallel-size",
    "--fastapi-root-path": "--root-path",
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
    "--shutdown-timeout": "--drain-timeout",
    "--speculative-draft-model": "--speculative-model",
    "--speculative-draft-model-path": "--speculative-model",
    "--speculative-draft-model-quantization": "--speculative-draft-quantization",
    "--speculative-model-quantization": "--speculative-draft-quantization",
    "--speculative-num-steps": "--num-speculative-tokens",
    "--tokenizer-path": "--tokenizer",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "--uvicorn-log-level": "--log-level",
}
"""Settings with a value and their equivalents."""

SWITCHES = {
    "--disable-cuda-graph": "--enforce-eager",
    "--disable-mm-preprocessor-cache": "--mm-processor-cache-gb=0",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--enable-deepep-moe": "--enable-expert-parallel",
    "--enable-ep-moe": "--enable-expert-parallel",
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
_EXACT = "a draft is accepted if it equals the target's own token, so that drafts never change the text"
_STATES = "recurrent states are float32"
_EXPERTS = "--enable-expert-parallel divides experts among the ranks of --tensor-parallel-size"

ACCEPTED: dict[str, tuple[tuple[str, ...], str]] = {
    "--api-server-count": (("1",), "one process serves the API"),
    "--attention-context-parallel-size": (("1",), _CONTEXT),
    "--attn-cp-size": (("1",), _CONTEXT),
    "--block-size": (("16",), "pages of the KV cache have 16 tokens"),
    "--chat-template-content-format": (("auto", "string"), "templates get message contents as text"),
    "--config-format": (("auto", "hf", "mistral"), "the format follows from the checkpoint's files"),
    "--convert": (("auto", "none", "embed", "classify", "reward"), _EMBEDS),
    "--data-parallel-size": (("1",), _ONE_ENGINE),
    "--dcp-size": (("1",), _CONTEXT),
    "--decode-context-parallel-size": (("1",), _CONTEXT),
    "--detokenizer-worker-num": (("1",), "one process serves the API"),
    "--distributed-executor-backend": (("uni", "mp"), _ONE_ENGINE),
    "--ep": (("1",), _EXPERTS),
    "--ep-size": (("1",), _EXPERTS),
    "--expert-parallel-size": (("1",), _EXPERTS),
    "--grammar-backend": (_GRAMMARS, _LLGUIDANCE),
    "--guided-decoding-backend": (_GRAMMARS, _LLGUIDANCE),
    "--kv-offloading-backend": (("native",), "host memory is the engine's own; --cpu-offload-gb sets it"),
    "--lora-eviction-policy": (("lru",), "the adapter that was used least recently is evicted"),
    "--mamba-cache-dtype": (("auto",), _STATES),
    "--mamba-ssm-cache-dtype": (("auto", "float32"), _STATES),
    "--mamba-ssm-dtype": (("float32",), _STATES),
    "--model-config-parser": (("auto", "hf", "mistral"), "the format follows from the checkpoint's files"),
    "--model-impl": (("auto", "vllm", "sglang"), "every family is Unisono's own (docs/reference/models.md)"),
    "--moe-data-parallel-size": (("1",), _EXPERTS),
    "--moe-dp-size": (("1",), _EXPERTS),
    "--nnodes": (("1",), _MACHINES),
    "--node-rank": (("0",), _MACHINES),
    "--page-size": (("16",), "pages of the KV cache have 16 tokens"),
    "--pipeline-parallel-size": (("1",), _STAGES),
    "--pp": (("1",), _STAGES),
    "--pp-size": (("1",), _STAGES),
    "--prefill-context-parallel-size": (("1",), _CONTEXT),
    "--preemption-mode": (("recompute",), "preempted requests are recomputed"),
    "--response-role": (("assistant",), "answers have the role assistant"),
    "--radix-eviction-policy": (("lru",), "the prefix that was used least recently is evicted"),
    "--runner": (("auto", "generate", "pooling"), _EMBEDS),
    "--spec-decoding-acceptance-method": (("rejection_sampler",), _EXACT),
    "--speculative-accept-threshold-acc": (("1", "1.0"), _EXACT),
    "--speculative-accept-threshold-single": (("1", "1.0"), _EXACT),
    "--speculative-draft-kv-cache-dtype": (("auto",), "a drafter's keys and values have its dtype"),
    "--speculative-draft-load-format": (("auto",), "--speculative-config sets load_format"),
    "--speculative-draft-tensor-parallel-size": (("1",), "--speculative-config sets draft_tensor_parallel_size"),
    "--stream-interval": (("1",), "every round's tokens are streamed at once"),
    "--structured-outputs-config": (tuple(f'{{"backend": "{name}"}}' for name in _GRAMMARS), _LLGUIDANCE),
    "--task": (("auto", "generate", "embed", "embedding", "classify", "score", "reward"), _EMBEDS),
    "--tokenizer-backend": (("huggingface",), "tokenizers are read through transformers"),
    "--tokenizer-mode": (("auto", "hf"), "tokenizers are read through transformers"),
    "--tokenizer-worker-num": (("1",), "one process serves the API"),
    "--video-pruning-rate": (("0", "0.0"), "every frame's tokens are kept"),
}
"""Settings with a value of which only these values can be honoured, and the reason."""

ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
"""``kv_role`` of vLLM's ``--kv-transfer-config`` -> role."""

ALGORITHMS = {
    "NEXTN": "mtp", "MTP": "mtp", "EAGLE": "eagle", "EAGLE3": "eagle3", "STANDALONE": "standalone", "NGRAM": "ngram",
    "DFLASH": "dflash", "DSPARK": "dspark",
    "NONE": "none",
}  # fmt: skip
"""Values of ``--speculative-algorithm`` -> speculative method."""

QUANTIZATIONS = {
    "auto_round": "auto-round", "awq_marlin": "awq", "gptq_marlin": "gptq", "inc": "auto-round",
    "modelopt_fp4": "modelopt", "modelopt_fp8": "modelopt", "w8a8_fp8": "compressed-tensors",
    "w8a8_int8": "compressed-tensors",
}  # fmt: skip
"""Weight formats of other engines that name a kernel or a part of a format -> the format."""

SAMPLING_DEFAULTS = {"model": "auto", "openai": "vllm"}
"""Values of SGLang's ``--sampling-defaults`` -> ``--generation-config``."""

_ATTENTION = {"triton_attn": "triton", "torch_native": "torch", "torch_sdpa": "torch"} | dict.fromkeys(
    (
        "cutlass_mla", "fa3", "fa4", "flash_attn", "flash_attn_mla", "flashattn_mla", "flashinfer", "flashinfer_mla",
        "flashmla", "flex_attention", "trtllm_mha", "trtllm_mla",
    ),
    "auto",
)  # fmt: skip
"""Attention backends of other engines, in lower case -> ``--attention-backend``."""

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


def attention_backend(value: str) -> str:
    """The attention backend for another engine's name of one; auto for kernels that Unisono does not have."""
    return _ATTENTION.get(value.lower(), value)


def nearest(name: str, names: Collection[str]) -> str | None:
    """The most similar of ``names``; None if none is similar."""
    return next(iter(difflib.get_close_matches(name, sorted(names), 1, 0.7)), None)


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
