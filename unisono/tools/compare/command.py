"""The command ``unisono compare``: runs both configurations, compares tokens, and traces the first difference."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from unisono.config.preflight.model import MODEL_FLAGS, check_model
from unisono.tools.eval.problems import held_out_problems
from unisono.types import ConfigError, SamplingParams, SpeculativeConfig

SHORT = {
    "speculative_method": "method",
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "speculative_topk": "topk",
    "speculative_tree_nodes": "num_draft_tokens",
    "speculative_draft_quantization": "draft_quantization",
}
"""Short flags of the command line -> fields of a speculative config."""
SHOWN_TOKENS = 6
TRACING = {"enforce_eager": True, "graphs": "auto", "compile": False, "enable_prefix_caching": False}


@dataclass(frozen=True)
class Side:
    """One configuration: a model and flags of ``LLM``."""

    model: str
    flags: Mapping[str, Any]

    @classmethod
    def parse(cls, flag: str, model: str, text: str) -> Side:
        """Parse one side. text: a JSON object of flags; its ``model`` wins. Raises ConfigError and CheckpointError."""
        try:
            texts = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{flag} {text}: is not valid JSON: {error}.") from None
        if not isinstance(texts, dict):
            raise ConfigError(f'{flag} {text}: give a JSON object of flags, for example {{"dtype": "float32"}}.')
        texts = {name.removeprefix("--").replace("-", "_"): value for name, value in texts.items()}
        model = texts.pop("model", model)
        short = {SHORT[name]: texts.pop(name) for name in list(texts) if name in SHORT}
        if short:
            config = texts.pop("speculative_config", None) or {}
            texts["speculative"] = SpeculativeConfig.parse({**config, **short})
        flags = {name: texts[name] for name in MODEL_FLAGS if texts.get(name) is not None}
        check_model(model, needs_text=True, **flags)
        return cls(model, texts)

    def open(self, **more: Any) -> Any:
        """An ``LLM`` of this configuration."""
        from unisono.entrypoints.llm import LLM

        return LLM(self.model, **{"graph_capture": "lazy", **self.flags, **more})


@dataclass(frozen=True)
class Finding:
    """The result of a prompt.

    index: of the first differing token; None if none differs. tokens: each side's there; None if its answer had ended.
    traced: eager passes differ in the same token. op: the first difference. ops: number of compared ops.
    """

    prompt: int
    length: int
    index: int | None = None
    tokens: tuple[int | None, int | None] = (None, None)
    texts: tuple[str, str] = ("", "")
    traced: bool = False
    op: Any = None
    ops: int = 0

    def lines(self) -> list[str]:
        """The finding in words."""
        if self.index is None:
            lines = [f"prompt {self.prompt}: the same {self.length} tokens"]
            if self.op is not None:
                lines += self._op()
            elif self.traced:
                lines.append(f"    {self.ops} ops of the model ran in both, with the same bits for every position")
            return lines
        names = ["the end" if token is None else f"token {token}" for token in self.tokens]
        lines = [
            f"prompt {self.prompt}: token {self.index} differs: A has {names[0]}, B has {names[1]}",
            f"    A: …{self.texts[0]!r}",
            f"    B: …{self.texts[1]!r}",
        ]
        if not self.traced:
            lines.append("    eager passes give both the same tokens: what replays graphs makes the difference")
        elif self.op is None:
            lines.append(
                f"    {self.ops} ops of the model ran in both, and gave the same bits for every position before: "
                "sampling, acceptance or an op that only one of them has makes the difference"
            )
        else:
            lines += self._op()
        return lines

    def _op(self) -> list[str]:
        op = self.op
        number = f", number {op.number + 1} there" if op.number else ""
        return [
            f"    first differing op: {op.op} of {op.place}{number}, at position {op.position}",
            f"    {op.differing} of {op.elements} elements, largest difference {op.largest:.3g} "
            f"(A in pass {op.passes[0]}, B in pass {op.passes[1]})",
        ]


def prompts_of(llm: Any, texts: Sequence[str], count: int) -> list[list[int]]:
    """Token ids of the texts, or of held-out problems, as conversations if there is a chat template."""
    if texts:
        return [llm.tokenizer.encode(text) for text in texts]
    problems = held_out_problems(count)
    if llm.tokenizer.chat_template is None:
        return [llm.tokenizer.encode(one.question) for one in problems]
    return [llm.chat_prompt(one.messages())["prompt_token_ids"] for one in problems]


def compare(
    a: Side, b: Side, texts: Sequence[str], count: int, params: SamplingParams, trace_all: bool = False
) -> list[Finding]:
    """Run both sides, one after the other, and trace each prompt whose tokens differ; trace_all: all prompts.

    One finding for each prompt.
    """
    with a.open() as llm:
        if llm.tokenizer is None:
            raise ConfigError(f"{a.model} has no tokenizer; compare reads texts.")
        tokenizer = llm.tokenizer
        prompts = prompts_of(llm, texts, count)
        of_a = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]
    with b.open() as llm:
        of_b = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]
    found = []
    for number, (x, y) in enumerate(zip(of_a, of_b, strict=True)):
        index = _first(x, y)
        if index is None:
            found.append(Finding(number, len(x)))
            continue
        near = slice(max(0, index - SHOWN_TOKENS), index + SHOWN_TOKENS)
        shown = tokenizer.decode(x[near]), tokenizer.decode(y[near])
        found.append(Finding(number, len(x), index, (_at(x, index), _at(y, index)), shown))
    differing = [one for one in found if trace_all or one.index is not None]
    located = _located(a, b, differing, prompts, params) if differing else {}
    return [located.get(one.prompt, one) for one in found]


def _located(
    a: Side, b: Side, differing: Sequence[Finding], prompts: Sequence[Sequence[int]], params: SamplingParams
) -> dict[int, Finding]:
    """The findings of traces of eager passes, by prompt."""
    from unisono.tools.compare.trace import compared_ops, first_difference, traced

    traces = []
    for side in (a, b):
        with side.open(**TRACING, max_num_seqs=1) as llm:
            ends = [one.length if one.index is None else one.index + 1 for one in differing]
            limits = [replace(params, max_tokens=max(end, 1)) for end in ends]
            pairs = zip(differing, limits, strict=True)
            traces.append([traced(llm, prompts[one.prompt], each) for one, each in pairs])
    located = {}
    for one, x, y in zip(differing, *traces, strict=True):
        index = max(one.length - 1, 0) if one.index is None else one.index
        same = _at(x.output, index) == _at(y.output, index) and x.output[:index] == y.output[:index]
        if same and one.index is not None:
            located[one.prompt] = one
            continue
        op = first_difference(x, y, len(prompts[one.prompt]) + index)
        located[one.prompt] = replace(one, traced=True, op=op, ops=compared_ops(x, y))
    return located


def report(found: Sequence[Finding], as_json: bool) -> str:
    """All findings, as lines or as JSON."""
    differ = sum(one.index is not None for one in found)
    if as_json:
        rows = [asdict(replace(one, op=None)) | {"op": one.op and asdict(one.op)} for one in found]
        return json.dumps({"prompts": len(found), "differ": differ, "found": rows}, indent=2)
    lines = [line for one in found for line in one.lines()]
    return "\n".join([*lines, f"{differ} of {len(found)} prompts differ"])


def _first(x: Sequence[int], y: Sequence[int]) -> int | None:
    if list(x) == list(y):
        return None
    return next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))


def _at(tokens: Sequence[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None
