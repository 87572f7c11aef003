"""Environment variables of Unisono: every ``UNISONO_*`` switch that the package reads, with a typed accessor.

Other modules call the accessors; none reads a ``UNISONO_*`` variable itself (``tests/config/test_env.py``). A variable
is read at each call, so a test or a program may set it before the engine starts. :func:`markdown` writes the table of
docs/reference/environment.md. Variables of other projects (``CUDA_VISIBLE_DEVICES``, ``OMP_NUM_THREADS`` …) are read
where they are used. Any module may import this one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Variable:
    """A documented variable. values: accepted values; default: the effect if it is unset; both in Markdown."""

    name: str
    values: str
    default: str
    purpose: str

    def read(self) -> str | None:
        """Return the value; None if the variable is unset."""
        return os.environ.get(self.name)


API_KEY = Variable(
    "UNISONO_API_KEY",
    "a string that is not empty",
    "none: every client is served",
    "API key of `unisono serve` (`--api-key`), and the key that client commands send.",
)

TRANSFER_KEY = Variable(
    "UNISONO_TRANSFER_KEY",
    "a string, the same for all engines",
    "none, which is an error over TCP",
    "Key with which prefill and decode engines prove that they belong together.",
)

CACHE = Variable(
    "UNISONO_CACHE",
    "a directory",
    "`$XDG_CACHE_HOME/unisono`, or `~/.cache/unisono`",
    "Directory of parsed checkpoint configurations, which later starts read.",
)

BYTECODE = Variable(
    "UNISONO_BYTECODE",
    "a directory; `0`: none",
    "`bytecode` in the directory of `UNISONO_CACHE`",
    "Directory of Python's bytecode. The program `unisono` writes it if the installed packages have none and Python "
    "would keep none.",
)

COMPILE_PROCESSES = Variable(
    "UNISONO_COMPILE_PROCESSES",
    "a whole number; 0 compiles in threads of the engine process",
    "one per other CPU core, at most 16",
    "Number of processes that compile kernels at the start.",
)

KERNELS = Variable(
    "UNISONO_KERNELS",
    "a directory; `0`: none",
    "the package's own archives, if it has any",
    "Directory of archives of compiled kernels, which starts read in place of compiling.",
)

START_NOTES = Variable(
    "UNISONO_START_NOTES",
    "a directory; `0`: none",
    "`starts` in the directory of `UNISONO_CACHE`",
    "Directory of what a start compared and measured on a GPU, which later starts with the same GPU, driver, versions, "
    "sources and settings read in place of doing it again.",
)

GATHER = Variable(
    "UNISONO_GATHER",
    "`nccl`",
    "a kernel over peer memory if it works, otherwise NCCL",
    "Transport of small gathers between the GPUs of a model. `nccl` disables the kernel.",
)

STAYING_LAUNCHES = Variable(
    "UNISONO_STAYING_LAUNCHES",
    "`0`: no persistent launches",
    "on",
    "Persistent launches of fused layer tails. Set `0` for processes that share a GPU's multiprocessors (MPS).",
)

VARIABLES = (
    API_KEY,
    TRANSFER_KEY,
    CACHE,
    BYTECODE,
    COMPILE_PROCESSES,
    KERNELS,
    START_NOTES,
    GATHER,
    STAYING_LAUNCHES,
)
"""All variables, in the order of the documentation."""

OTHERS = {
    "SGLANG_TORCH_PROFILER_DIR": "`--profile-dir`",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "`--hf-overrides` with a rotary scaling",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "`--enable-lora --allowed-lora-path`",
    "VLLM_API_KEY": "`UNISONO_API_KEY`, or `--api-key`",
    "VLLM_ATTENTION_BACKEND": "`--attention-backend`",
    "VLLM_BATCH_INVARIANT": "always on",
    "VLLM_CACHE_ROOT": "`UNISONO_CACHE`",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "`--timeout-keep-alive`",
    "VLLM_IMAGE_FETCH_TIMEOUT": "`--media-timeout`",
    "VLLM_LOGGING_LEVEL": "`--log-level`",
    "VLLM_SERVER_DEV_MODE": "always on: keys have roles (docs/reference/limits.md)",
    "VLLM_TORCH_PROFILER_DIR": "`--profile-dir`",
}
"""Variables of vLLM and SGLang -> the equivalent, in Markdown."""


def api_key() -> str | None:
    """Return the API key; None if it is unset. An empty key is returned as it is, for the caller to refuse."""
    return API_KEY.read()


def transfer_key() -> bytes:
    """Return the key that prefill and decode engines share; empty if it is unset."""
    return (TRANSFER_KEY.read() or "").encode()


def cache_directory() -> Path:
    """Return the directory of parsed configurations. Raises RuntimeError if the user has no home directory."""
    if directory := CACHE.read():
        return Path(directory)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unisono"


def compile_processes() -> int | None:
    """Return the number of processes that compile kernels; None for the default."""
    value = COMPILE_PROCESSES.read() or ""
    return int(value) if value.isdecimal() else None


def kernel_archives(default: Path) -> Path | None:
    """Return the directory of archives of compiled kernels; None if starts must read none."""
    value = KERNELS.read()
    return default if not value else None if value == "0" else Path(value)


def start_notes() -> Path | None:
    """Return the directory of notes of earlier starts; None if starts must read none, or no directory is known."""
    return _cached(START_NOTES, "starts")


def bytecode() -> Path | None:
    """Return the directory of Python's bytecode; None if none must be kept, or no directory is known."""
    return _cached(BYTECODE, "bytecode")


def _cached(variable: Variable, name: str) -> Path | None:
    """The directory of a variable, by default ``name`` in the cache directory; None if it is 0 or not known."""
    value = variable.read()
    if value == "0":
        return None
    try:
        return Path(value) if value else cache_directory() / name
    except RuntimeError:  # there is no home directory
        return None


def gathers_by_nccl() -> bool:
    """True if NCCL carries small gathers, too."""
    return GATHER.read() == "nccl"


def persistent_launches() -> bool:
    """Return True unless persistent launches are disabled."""
    return STAYING_LAUNCHES.read() != "0"


def unread() -> list[str]:
    """Return a sentence for each variable of vLLM and SGLang that is set, and for unknown ones of Unisono."""
    known = {one.name for one in VARIABLES}
    names = sorted(name for name in os.environ if name.startswith(("UNISONO_", "VLLM_", "SGLANG_")))
    notes = [f"{name} is set and not read. Here: {OTHERS[name]}." for name in names if name in OTHERS]
    if rest := [name for name in names if name not in known and name not in OTHERS]:
        verb = "is" if len(rest) == 1 else "are"
        notes.append(f"{', '.join(rest)} {verb} set and not read (docs/reference/environment.md).")
    return [text.replace("`", "") for text in notes]


def markdown_of_others() -> str:
    """Return the second table of docs/reference/environment.md."""
    rows = ["| Variable of vLLM or SGLang | Here |", "|---|---|"]
    return "\n".join(rows + [f"| `{name}` | {here} |" for name, here in OTHERS.items()]) + "\n"


def markdown() -> str:
    """Return the table of docs/reference/environment.md."""
    rows = ["| Variable | Values | Default | Purpose |", "|---|---|---|---|"]
    rows += [f"| `{v.name}` | {v.values} | {v.default} | {v.purpose} |" for v in VARIABLES]
    return "\n".join(rows) + "\n"
