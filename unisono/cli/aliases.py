"""Flag names of SGLang and vLLM for the commands that start an engine; ``docs/reference/flags.md`` has the table.

:func:`translate` rewrites a command line before it is parsed. An alias is replaced by its flag, or accepted with a note
of what happens instead. No flag is ignored silently: a value that cannot be honoured is an error, and so is an unknown
flag; its error names the nearest known one. Only ``cli`` calls it.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from unisono.cli.dotted import join_dotted
from unisono.config.flag_aliases import (
    ACCEPTED,
    MAMBA_NOTE,
    MAMBA_STRATEGIES,
    QUANTIZATIONS,
    RENAMED,
    ROLES,
    SAMPLING_DEFAULTS,
    SHORT,
    SWITCHES,
    algorithm,
    attention_backend,
    check_accepted,
    nearest,
    refuse,
)
from unisono.config.flag_effects import NOTED_SWITCHES, NOTED_VALUES, REFUSED
from unisono.types import ConfigError


@dataclass
class Translation:
    """The rewritten command line while it is built.

    path: the model, if a flag named it. notes: messages for the user. defaults: "flag=value" for flags that are not set
    otherwise. more: positions of further values of a flag that takes several.
    """

    arguments: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    path: str | None = None
    topk: int = 1
    draft_tokens: int | None = None
    steps: int | None = None
    defaults: list[str] = field(default_factory=list)
    more: dict[int, str] = field(default_factory=dict)

    def switch(self, flag: str) -> None:
        """Rewrite an alias without a value."""
        if flag in NOTED_SWITCHES:
            self.notes.append(f"{flag}: no effect; {NOTED_SWITCHES[flag]}.")
        elif "=" in SWITCHES[flag]:
            self.defaults.append(SWITCHES[flag])
        elif SWITCHES[flag]:
            self.arguments.append(SWITCHES[flag])

    def value(self, flag: str, value: str) -> None:
        """Rewrite an alias with a value."""
        if flag == "--speculative-num-steps":
            self.steps = _whole(flag, value, "; --speculative-method none drafts nothing")
        flag = RENAMED.get(flag, flag)
        if flag in READ:
            READ[flag](self, flag, value)
        elif flag in ACCEPTED:
            check_accepted(flag, value)
        elif flag in NOTED_VALUES:
            self.notes.append(f"{flag} {value}: no effect; {NOTED_VALUES[flag]}.")
        else:
            self.arguments += [flag, value]

    def model(self, flag: str, value: str) -> None:
        self.path = value

    def algorithm(self, flag: str, value: str) -> None:
        self.arguments += ["--speculative-method", algorithm(flag, value)]

    def eagle_topk(self, flag: str, value: str) -> None:
        self.topk = _whole(flag, value)

    def num_draft_tokens(self, flag: str, value: str) -> None:
        self.draft_tokens = _whole(flag, value)

    def mamba_strategy(self, flag: str, value: str) -> None:
        if value not in MAMBA_STRATEGIES:
            raise ConfigError(f"{flag} {value!r} is unknown; choose one of {', '.join(MAMBA_STRATEGIES)}.")
        self.notes.append(f"{flag} {value}: {MAMBA_NOTE}")

    def attention_backend(self, flag: str, value: str) -> None:
        ours = attention_backend(value)
        if ours == "auto" != value.lower():
            self.notes.append(f"{flag} {value}: no effect; {NOTED_VALUES['--moe-backend']}.")
        self.arguments += [flag, ours]

    def cpu_offload(self, flag: str, value: str) -> None:
        self.notes.append(f"{flag} {value}: host memory for evicted KV pages; weights stay on the device.")
        self.arguments += [flag, value]

    def quantization(self, flag: str, value: str) -> None:
        self.arguments += [flag, QUANTIZATIONS.get(value, value)]

    def tokens(self, flag: str, value: str) -> None:
        self.arguments += [flag, str(_tokens(flag, value))]

    def sampling_defaults(self, flag: str, value: str) -> None:
        if value not in SAMPLING_DEFAULTS:
            raise ConfigError(f"{flag} {value!r} is unknown; choose one of {', '.join(SAMPLING_DEFAULTS)}.")
        self.arguments += ["--generation-config", SAMPLING_DEFAULTS[value]]

    def load_format(self, flag: str, value: str) -> None:
        self.arguments += [flag, "auto" if value == "safetensors" else value]

    def disaggregation_mode(self, flag: str, value: str) -> None:
        self.arguments += ["--role", "both" if value == "null" else value]

    def kv_transfer(self, flag: str, value: str) -> None:
        try:
            values = json.loads(value)
            role = values["kv_role"]
            self.arguments += ["--role", ROLES[role]]
            if values.get("kv_connector") == "NixlConnector":
                self.arguments += ["--transfer-backend", "nixl"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f'{flag} {value}: give JSON with a "kv_role" of {", ".join(ROLES)}.') from None
        self.notes.append(
            f"{flag}: the role is {ROLES[role]}; --transfer-listen and --prefill-url set the addresses of pages."
        )

    def finish(self) -> None:
        """Add the flags that depend on several aliases (a chain or a tree of drafts), and the defaults."""
        values = {argument.partition("=")[0] for argument in self.arguments}
        self.arguments += [each for each in self.defaults if each.partition("=")[0] not in values]
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
    "--disaggregation-mode": Translation.disaggregation_mode,
    "--kv-transfer-config": Translation.kv_transfer,
    "--attention-backend": Translation.attention_backend,
    "--cpu-offload-gb": Translation.cpu_offload,
    "--load-format": Translation.load_format,
    "--max-model-len": Translation.tokens,
    "--max-num-batched-tokens": Translation.tokens,
    "--quantization": Translation.quantization,
    "--sampling-defaults": Translation.sampling_defaults,
    "--speculative-algo": Translation.algorithm,
    "--speculative-algorithm": Translation.algorithm,
    "--speculative-eagle-topk": Translation.eagle_topk,
    "--speculative-num-draft-tokens": Translation.num_draft_tokens,
    "--mamba-radix-cache-strategy": Translation.mamba_strategy,
    "--mamba-scheduler-strategy": Translation.mamba_strategy,
}
"""Flags with a value that need more than a replacement."""

OWN = (
    "--attention-backend", "--cpu-offload-gb", "--load-format", "--max-model-len", "--max-num-batched-tokens",
    "--quantization",
)  # fmt: skip
"""Flags of Unisono with values of other engines, or with another meaning there."""

ALIASES = tuple(
    flag
    for flag in (*SHORT, *RENAMED, *SWITCHES, *READ, *ACCEPTED, *NOTED_VALUES, *NOTED_SWITCHES, *REFUSED)
    if flag not in OWN
)
"""Every name that is not a flag of Unisono."""


def translate(
    arguments: Sequence[str], known: Collection[str], switches: Collection[str], lists: Collection[str] = ()
) -> Translation:
    """Rewrite a command line.

    known: every flag of the command. switches: those without a value. lists: those with one value or several, such as
    ``--served-model-name a b``. Raises ConfigError for a value that cannot be honoured, a missing value, a flag that is
    neither known nor an alias, and a model that is named twice.
    """
    result, positional = Translation(), list[str]()
    rest = deque(join_dotted(arguments))
    while rest:
        argument = rest.popleft()
        flag, equals, values = argument.partition("=")
        flag = SHORT.get(flag, flag)
        if re.fullmatch(r"-O\d", flag):
            flag = "--compilation-config"
        if flag.startswith("--"):
            flag = flag.replace("_", "-")  # vLLM accepts underscores, too
        if (long := RENAMED.get(flag)) in ACCEPTED:  # only some commands have the flag
            flag = long
        if not flag.startswith("--") or flag == "--":
            positional.append(argument)
            result.arguments.append(argument)
        elif flag in known and flag not in READ:
            result.arguments.append(flag + equals + values)
            if not equals and flag not in switches and rest:
                result.arguments.append(rest.popleft())
            while flag in lists and rest and not rest[0].startswith("-"):
                result.more[len(result.arguments)] = flag
                result.arguments += [flag, rest.popleft()]
        elif flag in SWITCHES or flag in NOTED_SWITCHES:
            result.switch(flag)
        elif flag in REFUSED:
            refuse(flag)
        elif flag in RENAMED or flag in READ or flag in ACCEPTED or flag in NOTED_VALUES:
            result.value(flag, values if equals else _value(flag, rest))
            while _continues(flag, rest, lists):
                result.value(flag, rest.popleft())
        else:
            raise ConfigError(f"{flag} is unknown. {_nearest(flag, known)}")
    if result.path is not None:
        if positional:
            raise ConfigError(f"The model is named twice, as PATH and as {result.path!r}: leave one of them out.")
        result.arguments.insert(0, result.path)
    elif not positional and result.more:
        del result.arguments[max(result.more)]  # the last of several values is PATH, as in --served-model-name me tiny
    result.finish()
    return result


def _value(flag: str, rest: deque[str]) -> str:
    if not rest:
        raise ConfigError(f"{flag} needs a value.")
    return rest.popleft()


def _whole(flag: str, value: str, way_out: str = "") -> int:
    if not (value.isascii() and value.isdecimal() and int(value) >= 1):
        raise ConfigError(f"{flag} {value!r}: give a whole number from 1 on{way_out}.")
    return int(value)


def _tokens(flag: str, value: str) -> int:
    """A number of tokens: whole, or with vLLM's suffixes, k for 1000 and K for 1024. Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmKM]?)", value)
    number = float(found[1]) * _SUFFIXES[found[2]] if found else 0.0
    if number < 1 or number != int(number):
        without = "the model's context" if flag == "--max-model-len" else "8192, on a CPU 512"
        raise ConfigError(
            f"{flag} {value}: give a whole number of tokens from 1 on, such as 8192, 8k (8000) or 8K (8192). Without "
            f"the flag it is {without}."
        )
    return int(number)


_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}

_MORE = {"--lora-target-modules": r"all(-linear)?|[a-z_]+_(proj|head|tokens)"}
"""Pattern of further values by flag; of other noted flags, further values are numbers."""


def _continues(flag: str, rest: deque[str], lists: Collection[str]) -> bool:
    """True if the next argument is a further value of an alias with several values."""
    if not rest or rest[0].startswith("-"):
        return False
    if flag in NOTED_VALUES:
        return re.fullmatch(_MORE.get(flag, r"[\d.]+"), rest[0]) is not None
    return RENAMED.get(flag) in lists and "=" in rest[0]


def _nearest(flag: str, known: Collection[str]) -> str:
    """Advice about an unknown flag."""
    near = nearest(flag, {*known, *ALIASES})
    return (
        f"{f'The nearest known flag is {near}; ' if near else ''}--help=all lists all flags, and "
        "docs/reference/flags.md the names of other engines."
    )
