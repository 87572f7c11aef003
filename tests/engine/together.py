"""Requests that use many features at once, and a model for them. ``observed.py`` notes what happens to them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tests.engine.matrix import config_of
from tests.engine.pictures import Picture, make_seeing, prompt, vision_of, words
from tests.models.fields import END
from tests.models.make import make_tokenizer
from tests.models.make_adapters import LINEARS, make_adapter
from unisono.entrypoints.llm import LLM
from unisono.text.tool_parsers.base import ParserContext, Tool
from unisono.text.tool_parsers.formats import NAMES
from unisono.text.tool_parsers.structure import Structure
from unisono.types import (
    EngineRequest,
    FinishReason,
    Overrides,
    SamplingParams,
    SpeculativeConfig,
    StructuredOutputs,
    TokenDelta,
    vectors,
)

# ---- the requests -----------------------------------------------------------------------------------

FLAGS = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}
SCHEMA = StructuredOutputs(
    json={
        "type": "object",
        "properties": {"a": {"enum": ["cat", "dog"]}, "b": FLAGS},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    disable_any_whitespace=True,
)
PYTHONIC = NAMES["pythonic"]
ARGUMENTS = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}, "b": FLAGS}, "required": ["n", "b"]}
TOOLS = [Tool("f", ARGUMENTS)]
CALL = Structure(PYTHONIC, {}).required(TOOLS, parallel=False)
ADAPTERS = ("one", "two")
NARROW = tuple(range(40, 44))
"""Few allowed tokens, so that drafts are accepted."""
EXAMPLE: list[int] = make_tokenizer().encode('[f(n=1, b=[true,false])]{"a":"cat"', add_special_tokens=False)
"""Text of answers in prompts, from which n-gram drafts copy."""
LETTERS: list[int] = make_tokenizer().encode(' fnbcatdogruels{}[]()=,:"0123', add_special_tokens=False)
"""Characters of the schema and of the tool call; without tabs and line ends answers are short."""


@dataclass(frozen=True)
class Model:
    """A random mixture of experts that sees, and two adapters of its attention."""

    path: Path
    adapters: dict[str, Path]

    @classmethod
    def make(cls, folder: Path) -> Model:
        path = make_seeing(folder / "target", "qwen3_vl_moe", num_experts=8)
        linears = LINEARS[:4]
        made = {name: make_adapter(folder / name, path, n, targets=linears) for n, name in enumerate(ADAPTERS, 1)}
        return cls(path, made)

    def load_adapters(self, llm: LLM) -> None:
        """Load both adapters."""
        for name, directory in self.adapters.items():
            llm.engine.command("load_adapter", {"name": name, "directory": str(directory)})

    def request(
        self, name: str, seed: int, size: int, params: SamplingParams, adapter: str | None = None,
        picture: bool = False, embeddings: bool = False,
    ) -> EngineRequest:  # fmt: skip
        """A prompt of ``size`` tokens.

        picture: also an image of 8 tokens, and EXAMPLE. embeddings: random vectors in place of the third and the fifth
        token.
        """
        if picture:
            item = Picture(8, 4, seed)
            made = prompt(vision_of(self.path), words(size, seed), item, EXAMPLE)
            ids, media = made.ids, made.media
        else:
            ids, media = words(size, seed), ()
        overrides = None
        if embeddings:
            hidden = config_of(self.path).hidden_size
            rows = 0.1 * torch.randn(2, hidden, generator=torch.Generator().manual_seed(seed))
            ids = [-1 if position in (2, 4) else token for position, token in enumerate(ids)]
            overrides = Overrides([2, 4], vectors.pack(rows))
        return EngineRequest(
            name, ids, params, () if params.ignore_eos else (END,), overrides=overrides, media=media, adapter=adapter
        )

    def free(self, count: int, size: int, most: int = 20) -> list[EngineRequest]:
        """Requests with log-probabilities, and adapters but for every third one; mixed passes take them."""
        return [
            self.request(f"free{i}", i, size + 7 * i, parameters(i, most), (*ADAPTERS, None)[i % 3])
            for i in range(count)
        ]

    def rich(self, count: int, size: int) -> list[EngineRequest]:
        """Requests with an adapter, a picture, embeddings, log-probabilities, and a schema or a tool call. The first
        one also has log-probabilities of its prompt.
        """
        made = []
        for i in range(count):
            params, name = formed(i), f"rich{i}" if i % 2 == 0 else f"call{i}"
            if i == 0:
                params = replace(params, prompt_logprobs=1, logprob_start_len=5)  # behind the embeddings
            made.append(self.request(name, 50 + i, size + 5 * i, params, ADAPTERS[i % 2], True, True))
        return made

    def bare(self, count: int, size: int) -> list[EngineRequest]:
        """Requests of token ids alone, which a prefill engine computes: free, then with a schema or a tool call."""
        made = []
        for i in range(count):
            params = parameters(i, 60) if i < count // 2 else formed(i)
            made.append(self.request(f"bare{i}", 90 + i, size + 5 * i, params))
        return made


def parameters(number: int, most: int) -> SamplingParams:
    """Greedy or sampled, ``most`` tokens of a few, with log-probabilities."""
    return SamplingParams(
        temperature=(0.0, 0.8)[number % 2], seed=number, max_tokens=most, ignore_eos=True, logprobs=number % 3,
        allowed_token_ids=NARROW,
    )  # fmt: skip


def formed(number: int) -> SamplingParams:
    """Greedy or sampled, with log-probabilities, and a schema or, for odd numbers, a tool call."""
    return SamplingParams(
        temperature=(0.9, 0.0)[number // 2 % 2], seed=number, max_tokens=50, logprobs=1,
        structured_outputs=CALL if number % 2 else SCHEMA, allowed_token_ids=(*LETTERS, END),
    )  # fmt: skip


# ---- answers ----------------------------------------------------------------------------------------


@dataclass
class Answer:
    """Everything that a request gets. logprobs, prompt_logprobs: entries as text, to the last digit."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)
    prompt_logprobs: list[str] = field(default_factory=list)
    finish: FinishReason = FinishReason.RUNNING

    def add(self, delta: TokenDelta) -> None:
        """Append a delta."""
        self.tokens += delta.token_ids
        self.logprobs += map(str, delta.logprobs or ())
        self.prompt_logprobs += map(str, delta.prompt_logprobs or ())
        self.finish = delta.finish


def calls_of(llm: LLM, answer: Answer) -> list[tuple[str, str]]:
    """(name, arguments) of the tool calls in an answer."""
    assert llm.tokenizer is not None
    parser = PYTHONIC.parser(ParserContext(TOOLS, str))
    calls = parser.feed(llm.tokenizer.backend.decode(answer.tokens, skip_special_tokens=True), last=True).calls
    return [(call.name or "", call.arguments) for call in calls]


# ---- engines ----------------------------------------------------------------------------------------

TEXT: dict[str, Any] = {"max_model_len": 144, "enable_lora": True, "max_loras": 2, "kv_cache_dtype": "fp8"}
"""Flags on which the text depends, or the requests that an engine accepts."""
ALONE: dict[str, Any] = {**TEXT, "max_num_seqs": 1, "enforce_eager": True, "enable_prefix_caching": False}
"""Flags of the engine to compare with: each request by itself, its prompt in one pass, no drafts, no graphs."""
CROWDED: dict[str, Any] = {
    **TEXT, "adaptive": True, "enable_mixed_chunk": True, "max_num_batched_tokens": 24, "max_num_seqs": 6,
    "num_pages": 1 + 14, "cpu_offload_ratio": 8,
}  # fmt: skip
"""Flags of an engine in which everything happens: prompts in chunks, preemption, pages in host memory."""
TREE = SpeculativeConfig.parse({"method": "ngram", "topk": 2, "num_draft_tokens": 6})
