"""The catalog: every model, drafter, feature, attention backend and bundled checkpoint, in one place.

Entries are strings, so that reading the catalog imports nothing; :meth:`Registry.load` imports the one entry that is
used. Nothing registers itself at import time. Where a kind is open to other packages, the entry points that they
declare are added. Imports types, checkpoint_files, gguf and hub only; any module may import it.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.config import hub, mistral
from unisono.config.checkpoint_files import ADAPTER_CONFIG, CONFIG, names_in, no_config, not_a_directory, read_object
from unisono.config.decoder_table import ALSO, ROWS
from unisono.config.gguf.directory import described
from unisono.config.gguf.header import is_gguf
from unisono.config.preflight.families import ENCODERS, HEADLESS
from unisono.types import CheckpointError, ConfigError, SpeculativeConfig, UnisonoError


@dataclass(frozen=True)
class Registry:
    """Names of one kind of entry, and the location of each as ``"module:attribute"``.

    kind: the word for it in errors. error: the exception for an unknown name. group: the entry point group by which
    installed packages add names; they cannot replace a name of ``entries``.
    """

    kind: str
    entries: Mapping[str, str]
    error: type[UnisonoError] = ConfigError
    group: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The supported names, sorted."""
        return tuple(sorted({*self.entries, *self._installed()}))

    @property
    def listed(self) -> tuple[str, ...]:
        """The supported names in the order of the table, those of installed packages last."""
        return tuple(dict.fromkeys((*self.entries, *sorted(self._installed()))))

    def __contains__(self, name: object) -> bool:
        return name in self.entries or name in self._installed()

    def load(self, name: str) -> Any:
        """Import entry ``name`` and return its attribute.

        Raises ``error`` listing what is supported, and for an entry point of another package that cannot be imported.
        """
        where = self.entries.get(name) or self._installed().get(name)
        if where is None:
            raise self.error(f"Unknown {self.kind} {name!r}. Supported: {', '.join(self.names)}.")
        module, _, attribute = where.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            if name in self.entries:
                raise
            raise self.error(
                f"The entry point {name} = {where!r} of {self.group} cannot be imported: {error}. Correct it in the "
                "pyproject.toml of its package, and install the package again."
            ) from error

    def _installed(self) -> dict[str, str]:
        if self.group is None:
            return {}
        return _installed_entries(self.group, tuple(sys.path))


@functools.cache
def _installed_entries(group: str, folders: tuple[str, ...]) -> dict[str, str]:
    """Entry points of a group, by name, in the packages of these folders. Reading 200 packages takes 40 ms."""
    found: dict[str, str] = {}
    for package in importlib.metadata.distributions(path=list(folders)):
        for entry in package.entry_points.select(group=group):
            found.setdefault(entry.name, entry.value)  # as imports: the first folder wins
    return found


models = Registry(
    "model architecture",
    {
        "Gemma2ForCausalLM": "unisono.models.families.gemma3:GEMMA2",
        "Gemma3ForCausalLM": "unisono.models.families.gemma3:GEMMA3",
        "Gemma3ForConditionalGeneration": "unisono.models.families.gemma3:GEMMA3_VISION",
        "Gemma4ForCausalLM": "unisono.models.families.gemma4:GEMMA4",
        "Gemma4ForConditionalGeneration": "unisono.models.families.gemma4:GEMMA4_VISION",
        "Gemma4UnifiedForCausalLM": "unisono.models.families.gemma4_unified:GEMMA4_UNIFIED",
        "Gemma4UnifiedForConditionalGeneration": "unisono.models.families.gemma4_unified:GEMMA4_UNIFIED_VISION",
        "GptOssForCausalLM": "unisono.models.families.gpt_oss:GPT_OSS",
        "LlamaForCausalLM": "unisono.models.families.llama:LLAMA",
        "Llama4ForCausalLM": "unisono.models.families.llama4:LLAMA4",
        "Llama4ForConditionalGeneration": "unisono.models.families.llama4:LLAMA4_MEDIA",
        "MiniCPMForCausalLM": "unisono.models.families.minicpm:MINICPM",
        "MiniCPM3ForCausalLM": "unisono.models.families.minicpm3:MINICPM3",
        "MistralForCausalLM": "unisono.models.families.mistral:MISTRAL",
        "MixtralForCausalLM": "unisono.models.families.mixtral:MIXTRAL",
        "Qwen2ForCausalLM": "unisono.models.families.qwen2:QWEN2",
        "Qwen3ForCausalLM": "unisono.models.families.qwen3:QWEN3",
        "Qwen3NextForCausalLM": "unisono.models.families.qwen3_next:QWEN3_NEXT",
        "Qwen3_5ForCausalLM": "unisono.models.families.qwen3_5:QWEN3_5",
        "Qwen3_5ForConditionalGeneration": "unisono.models.families.qwen3_5:QWEN3_5_VISION",
        "Qwen3_5MoeForCausalLM": "unisono.models.families.qwen3_5_moe:QWEN3_5_MOE",
        "Qwen3_5MoeForConditionalGeneration": "unisono.models.families.qwen3_5_moe:QWEN3_5_MOE_VISION",
        "Qwen2VLForConditionalGeneration": "unisono.models.families.qwen2_vl:QWEN2_VL",
        "Qwen2_5_VLForConditionalGeneration": "unisono.models.families.qwen2_5_vl:QWEN2_5_VL",
        "Qwen3MoeForCausalLM": "unisono.models.families.qwen3_moe:QWEN3_MOE",
        "Qwen3VLForConditionalGeneration": "unisono.models.families.qwen3_vl:QWEN3_VL",
        "Qwen3VLMoeForConditionalGeneration": "unisono.models.families.qwen3_vl_moe:QWEN3_VL_MOE",
        "DeepseekV2ForCausalLM": "unisono.models.families.deepseek_v2:DEEPSEEK_V2",
        "DeepseekV3ForCausalLM": "unisono.models.families.deepseek_v3:DEEPSEEK_V3",
        "KimiK25ForConditionalGeneration": "unisono.models.families.deepseek_v3:KIMI_K25",
        "KimiLinearForCausalLM": "unisono.models.families.kimi_linear:KIMI_LINEAR",
        "Mistral4ForCausalLM": "unisono.models.families.mistral4:MISTRAL4",
        "MistralLarge3ForCausalLM": "unisono.models.families.mistral4:MISTRAL_LARGE3",
        "Dots1ForCausalLM": "unisono.models.families.dots1:DOTS1",
        "Ernie4_5_MoeForCausalLM": "unisono.models.families.ernie4_5_moe:ERNIE4_5_MOE",
        "Glm4MoeForCausalLM": "unisono.models.families.glm4_moe:GLM4_MOE",
        "Glm4MoeLiteForCausalLM": "unisono.models.families.glm4_moe_lite:GLM4_MOE_LITE",
        "BailingMoeV2ForCausalLM": "unisono.models.families.bailing_moe_v2:BAILING_MOE_V2",
        "BambaForCausalLM": "unisono.models.families.bamba:BAMBA",
        "GraniteMoeHybridForCausalLM": "unisono.models.families.granite_hybrid:GRANITE_HYBRID",
        "Lfm2ForCausalLM": "unisono.models.families.lfm2:LFM2",
        "Lfm2MoeForCausalLM": "unisono.models.families.lfm2:LFM2_MOE",
        "MiniMaxM2ForCausalLM": "unisono.models.families.minimax_m2:MINIMAX_M2",
        "NemotronHForCausalLM": "unisono.models.families.nemotron_h:NEMOTRON_H",
        "Qwen2MoeForCausalLM": "unisono.models.families.qwen2_moe:QWEN2_MOE",
        **{name: f"unisono.models.families.table:{name}" for name in ROWS},
        **{name: f"unisono.models.families.table:{row}" for name, row in ALSO.items()},
        **{name: f"unisono.models.families.headless:{name}" for name in HEADLESS},
        **{name: f"unisono.models.families.encoders:{name}" for name in ENCODERS},
        "Mistral3ForConditionalGeneration": "unisono.models.families.mistral3:MISTRAL3",
    },
    error=CheckpointError,
    group="unisono.models",
)
"""By ``architectures[0]`` of config.json; each entry is a ``models.config.Family``."""

formats = Registry(
    "weight format",
    {
        "auto-round": "unisono.layers.formats.gptq:read_auto_round",
        "awq": "unisono.layers.formats.int4:read_awq",
        "compressed-tensors": "unisono.layers.formats.compressed_tensors:read",
        "fbgemm_fp8": "unisono.layers.formats.fp8:read_fbgemm",
        "fp8": "unisono.layers.formats.fp8:read",
        "gguf": "unisono.layers.formats.gguf:read",
        "gptq": "unisono.layers.formats.gptq:read",
        "modelopt": "unisono.layers.formats.modelopt:read",
        "mxfp4": "unisono.layers.formats.mxfp4:read",
    },
    error=CheckpointError,
    group="unisono.formats",
)
"""By ``quantization_config.quant_method`` of config.json; ``gguf``: by ``--quantization`` alone, for GGUF files.

Each entry takes that config and returns a function from a module's name in the checkpoint to its
``layers.formats.base.WeightFormat``.
"""

online_formats = Registry("weight format that is made while loading", {"fp8": "unisono.layers.formats.fp8:ONLINE_FP8"})
"""By ``--quantization``, for checkpoints that are not quantised. Each entry is a ``layers.formats.base.WeightFormat``.
"""

drafters = Registry(
    "drafter",
    {
        "none": "unisono.drafters.none:NoDrafter",
        "combined": "unisono.drafters.combined:CombinedDrafter",
        "dflash": "unisono.drafters.block.drafter:DFlashDrafter",
        "dspark": "unisono.drafters.block.drafter:DSparkDrafter",
        "eagle": "unisono.drafters.eagle.eagle:EagleDrafter",
        "eagle3": "unisono.drafters.eagle.eagle3:Eagle3Drafter",
        "mtp": "unisono.drafters.mtp.mtp:MTPDrafter",
        "mtp_frozen": "unisono.drafters.mtp.frozen_kv:FrozenMTPDrafter",
        "ngram": "unisono.drafters.lookup.ngram:NgramDrafter",
        "standalone": "unisono.drafters.standalone:StandaloneDrafter",
        "suffix": "unisono.drafters.lookup.suffix:SuffixDrafter",
    },
    group="unisono.drafters",
)

features = Registry(
    "feature",
    {
        "filters": "unisono.passes.features.filters:Filters",
        "output_logprobs": "unisono.passes.features.output_logprobs:OutputLogprobs",
        "wide_logprobs": "unisono.passes.features.wide_logprobs:WideLogprobs",
        "grammar": "unisono.passes.features.grammar:Grammar",
        "adapters": "unisono.passes.features.adapters:AdapterFeature",
        "prompt_embeds": "unisono.passes.features.prompt_embeds:PromptEmbeds",
        "media": "unisono.passes.features.media:Media",
        "prompt_logprobs": "unisono.passes.features.prompt_logprobs:PromptLogprobs",
        "hidden_states": "unisono.passes.features.hidden_states:ReturnedHiddenStates",
        "routed_experts": "unisono.passes.features.routed_experts:RoutedExperts",
        "whole_prompts": "unisono.passes.features.whole_prompts:WholePrompts",
    },
    group="unisono.features",
)
"""Request features: additions to a pass beside its tokens. Each entry is a ``passes.features.base.Feature``."""

attention = Registry(
    "attention backend",
    {
        "torch": "unisono.attention.reference:ReferenceAttention",
        "triton": "unisono.attention.triton:TritonAttention",
    },
)

_BUNDLED = Path(__file__).parents[1] / "bundled"
_BUNDLED_MODELS = "tiny", "tiny-hybrid", "tiny-vl", "tiny-gemma"
_BUNDLED_HEADS = (
    "tiny-eagle", "tiny-eagle3", "tiny-mtp", "tiny-draft", "tiny-dflash", "tiny-hybrid-dflash", "tiny-vl-eagle3",
    "tiny-gemma-assistant",
)  # fmt: skip

bundled: Mapping[str, Path] = {
    name: _BUNDLED / name
    for name in (*_BUNDLED_MODELS, *_BUNDLED_HEADS)
    if name == "tiny" or (_BUNDLED / name).is_dir()
}
"""Directories of the checkpoints inside the package, by the name that may stand in place of a PATH: models and draft
heads.
"""

bundled_drafts: Mapping[str, SpeculativeConfig] = {
    "tiny": SpeculativeConfig("eagle3", model="tiny-eagle3"),
    "tiny-vl": SpeculativeConfig("eagle3", model="tiny-vl-eagle3"),
}
"""Default speculation of bundled models: the fastest of their heads. Others use their MTP modules or the assistant
beside them, if any.
"""


def drafts_of(path: Path) -> SpeculativeConfig | None:
    """The default speculation of a bundled model's directory; None for others, and if its head is not installed."""
    name = next((name for name, home in bundled.items() if home.resolve() == path.resolve()), "")
    found = bundled_drafts.get(name)
    return found if found is not None and found.model in bundled else None


def bundled_path(name: str) -> Path:
    """The directory of bundled checkpoint ``name``. Raises CheckpointError listing the bundled names."""
    if name not in bundled:
        raise CheckpointError(f"Unknown bundled checkpoint {name!r}. Bundled: {', '.join(bundled)}.")
    return bundled[name]


def resolve_name(path: str | Path, check: Callable[[Path], object] | None = None) -> Path:
    """Resolve a PATH of the user: a bundled name, a directory, a GGUF file, or the id of a checkpoint on the Hugging
    Face Hub.

    A bundled name wins over a directory of the same name (write ``./tiny`` for the directory), and a directory over an
    id. A checkpoint of the Hub is downloaded unless the cache has it; ``check`` is called with the directory as soon as
    it has config.json, before anything else is downloaded. A GGUF file, and a directory in Mistral's own form, are
    described by a directory in the cache. Raises CheckpointError.
    """
    if isinstance(path, str) and path in bundled:
        return bundled[path]
    local = Path(path).expanduser()
    if isinstance(path, str) and hub.is_id(path) and not local.exists():
        return hub.fetch(path, check)
    if mistral.is_native(local):
        return mistral.described(local)
    return described(local) if is_gguf(local) else local


def find_directory(path: str | Path, check: Callable[[Path], object] | None = None) -> Path:
    """The directory of a PATH, which has a config.json.

    Raises CheckpointError with the cause.

    check: see :func:`resolve_name`.
    """
    directory = resolve_name(path, check)
    names = f"Bundled names: {', '.join(bundled)}."
    if not directory.exists():
        raise CheckpointError(f"{directory} does not exist: give a checkpoint's directory{_near(directory)}. {names}")
    if not directory.is_dir():
        raise CheckpointError(f"{directory} {not_a_directory(directory)}. {names}")
    if not (directory / CONFIG).is_file():
        files = names_in(directory)
        adapter = read_object(directory / ADAPTER_CONFIG) if ADAPTER_CONFIG in files else None
        raise CheckpointError(f"{directory} {no_config(files, adapter)}. {names}")
    return directory


def _near(directory: Path) -> str:
    """A bundled name or a sibling directory with a name similar to that of ``directory``, for a message."""
    beside: list[str] = []
    with contextlib.suppress(OSError):
        beside = [each.name for each in directory.absolute().parent.iterdir() if each.is_dir()]
    found = difflib.get_close_matches(directory.name, [*bundled, *beside], 1, 0.8)
    return f" (did you mean {found[0]}?)" if found else ""
