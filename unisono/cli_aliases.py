"""SGLang's and vLLM's names of flags, for the commands that start an engine; ``docs/cli.md`` has the table.

:func:`translate` rewrites a command line before it is parsed. An alias gives the same as the flag that it stands for,
or is accepted with a note that says what happens instead. Nothing is ignored in silence: a value that cannot be
honoured is an error, and so is an unknown flag, which names the nearest known one. ``cli`` calls it; no other module
does.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from unisono.types import ConfigError

RENAMED = {
    "--context-length": "--max-model-len",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--max-running-requests": "--max-num-seqs",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--random-seed": "--seed",
    "--speculative-draft-model-path": "--speculative-model",
    "--speculative-num-steps": "--num-speculative-tokens",
}
"""Flags with a value that mean the same."""

SWITCHES = {"--disable-radix-cache": "--no-enable-prefix-caching", "--disable-cuda-graph": "--enforce-eager"}
"""Flags without a value that mean the same."""

ALGORITHMS = {
    "NEXTN": "mtp", "MTP": "mtp", "EAGLE": "eagle", "EAGLE3": "eagle3", "STANDALONE": "standalone", "NGRAM": "ngram",
    "NONE": "none",
}  # fmt: skip
"""Values of ``--speculative-algorithm``, and the methods that they stand for."""

MAMBA_STRATEGIES = ("auto", "no_buffer", "extra_buffer", "extra_buffer_lazy")


@dataclass
class Translation:
    """The rewritten command line as it grows. path: the model, where a flag named it. notes: for the user to read."""

    arguments: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    path: str | None = None
    topk: int = 1
    draft_tokens: int | None = None
    steps: int | None = None

    def model(self, flag: str, value: str) -> None:
        self.path = value

    def tensor_parallel(self, flag: str, value: str) -> None:
        if _whole(flag, value) != 1:
            raise ConfigError(f"{flag} {value}: this version runs on one GPU; give 1 or leave it out.")

    def algorithm(self, flag: str, value: str) -> None:
        if value.upper() not in ALGORITHMS:
            raise ConfigError(f"{flag} {value!r} is unknown; choose one of {', '.join(ALGORITHMS)}.")
        self.arguments += ["--speculative-method", ALGORITHMS[value.upper()]]

    def eagle_topk(self, flag: str, value: str) -> None:
        self.topk = _whole(flag, value)

    def num_draft_tokens(self, flag: str, value: str) -> None:
        self.draft_tokens = _whole(flag, value)

    def mamba_strategy(self, flag: str, value: str) -> None:
        if value not in MAMBA_STRATEGIES:
            raise ConfigError(f"{flag} {value!r} is unknown; choose one of {', '.join(MAMBA_STRATEGIES)}.")
        self.notes.append(
            f"{flag} {value}: nothing to choose here. A recurrent layer keeps one state per request and a ring of the "
            "newest inputs, so speculation needs no extra states; prefixes keep snapshots at aligned positions."
        )

    def finish(self) -> None:
        """What takes several flags: a chain of drafts, or a tree."""
        drafts = self.draft_tokens
        if self.topk > 1:
            if drafts is None or drafts < 2:
                raise ConfigError(
                    f"--speculative-eagle-topk {self.topk} asks for a tree: give --speculative-num-draft-tokens, 2 or "
                    "more (its nodes and the token before them)."
                )
            self.arguments += ["--speculative-topk", str(self.topk), "--speculative-tree-nodes", str(drafts - 1)]
        elif drafts is not None:
            steps = 3 if self.steps is None else self.steps
            if drafts != steps + 1:
                self.notes.append(
                    f"--speculative-num-draft-tokens {drafts}: a chain of {steps} steps verifies {steps + 1} tokens; "
                    "the number of steps counts."
                )


READ: dict[str, Callable[[Translation, str, str], None]] = {
    "--model-path": Translation.model,
    "--model": Translation.model,
    "--tp-size": Translation.tensor_parallel,
    "--tp": Translation.tensor_parallel,
    "--tensor-parallel-size": Translation.tensor_parallel,
    "--speculative-algorithm": Translation.algorithm,
    "--speculative-eagle-topk": Translation.eagle_topk,
    "--speculative-num-draft-tokens": Translation.num_draft_tokens,
    "--mamba-scheduler-strategy": Translation.mamba_strategy,
}
"""Flags with a value that more is to be said of."""

ALIASES = (*RENAMED, *SWITCHES, *READ)


def translate(arguments: Sequence[str], known: Collection[str], switches: Collection[str]) -> Translation:
    """Rewrite a command line. known: every flag of the command; switches: those of them that take no value.

    Raises ConfigError for a value that cannot be honoured, a missing value, a flag that is neither known nor an alias,
    and a model that is named twice.
    """
    result, positional = Translation(), False
    rest = iter(arguments)
    for argument in rest:
        flag, _, given = argument.partition("=")
        if not flag.startswith("--") or flag == "--":
            positional = True
            result.arguments.append(argument)
        elif flag in SWITCHES:
            result.arguments.append(SWITCHES[flag])
        elif flag in RENAMED or flag in READ:
            value = given if "=" in argument else _value(flag, rest)
            if flag == "--speculative-num-steps":
                result.steps = _whole(flag, value, "; --speculative-method none drafts nothing")
            if flag in RENAMED:
                result.arguments += [RENAMED[flag], value]
            else:
                READ[flag](result, flag, value)
        elif flag in known:
            result.arguments.append(argument)
            if "=" not in argument and flag not in switches:
                result.arguments += [value for value in (next(rest, None),) if value is not None]
        else:
            raise ConfigError(f"{flag} is unknown. {_nearest(flag, known)}")
    if result.path is not None:
        if positional:
            raise ConfigError(f"The model is named twice, as PATH and as {result.path!r}: leave one of them out.")
        result.arguments.insert(0, result.path)
    result.finish()
    return result


def _value(flag: str, rest: Iterator[str]) -> str:
    value = next(rest, None)
    if value is None:
        raise ConfigError(f"{flag} needs a value.")
    return value


def _whole(flag: str, value: str, way_out: str = "") -> int:
    if not (value.isascii() and value.isdecimal() and int(value) >= 1):
        raise ConfigError(f"{flag} {value!r}: give a whole number from 1 on{way_out}.")
    return int(value)


def _nearest(flag: str, known: Collection[str]) -> str:
    flags = sorted({*known, *ALIASES})
    nearest = max(flags, key=lambda one: difflib.SequenceMatcher(None, flag, one).ratio())
    return f"The nearest known flag is {nearest}; --help lists all, and docs/cli.md the names of other engines."
