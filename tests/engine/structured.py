"""Prompts and forms of structured outputs, and engines that draft, for the tests of grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.engine.helpers import engine, prompts
from tests.engine.matrix import SCARCE, Checkpoints, Way
from tests.models.fields import END
from tests.models.make import make_tokenizer
from unisono.entrypoints.llm import LLM
from unisono.types import SamplingParams, SpeculativeConfig, StructuredOutputs

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["id", "kind", "tags"],
    "additionalProperties": False,
}


def is_the_object(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["id", "kind", "tags"]
        and type(value["id"]) is int
        and 0 <= value["id"] <= 99
        and value["kind"] in ("cat", "dog")
        and len(value["tags"]) <= 2
        and all(type(tag) is bool for tag in value["tags"])
    )


def is_a_list(text: str) -> bool:
    return json.loads(text.replace("x", '"x"')) is not None


Form = tuple[StructuredOutputs, Callable[[str], Any]]

CHOICES = ("yes", "yesterday", 'no "\n', "ünïcödé")
PATTERN = r"((ab|ba|cc){2,5}-){1,3}[0-9]{2}"
EBNF = 'root ::= "[" (item ("," item){0,3})? "]"\nitem ::= "x" | "[" "x"? "]"'
FORMS: dict[str, Form] = {
    "json": (StructuredOutputs(json=SCHEMA, disable_any_whitespace=True), is_the_object),
    "regex": (StructuredOutputs(regex=PATTERN), re.compile(PATTERN).fullmatch),
    "choice": (StructuredOutputs(choice=CHOICES), CHOICES.__contains__),
    "grammar": (StructuredOutputs(grammar=EBNF), is_a_list),
}

LETTERS = tuple(make_tokenizer().encode("abc-0123456789", add_special_tokens=False))
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "edited": {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "top_p": 0.95, "logprobs": 2},
    "eager to end": {"logit_bias": {END: 6.0}, "logprobs": 0},  # drafters propose the end in vain, and in the end not
    "narrow": {"allowed_token_ids": (*LETTERS, END)},  # drafters are right now and then
}
FREE = SamplingParams(temperature=0.7, max_tokens=16, ignore_eos=True, logprobs=1)


def mix() -> tuple[list[list[int]], list[SamplingParams]]:
    """Each form under several kinds of parameters, greedy and sampled; every fifth request is free."""
    params = []
    for i, (form, _) in enumerate(list(FORMS.values()) * 3):
        kind = "narrow" if form.regex and i > 4 else ("plain", "edited", "eager to end")[i % 3]
        params.append(
            SamplingParams(
                temperature=(0.0, 1.0, 0.8)[i % 3], seed=i, max_tokens=60, structured_outputs=form,
                max_drafts=(None, None, None, 1, 0)[i % 5], **KINDS[kind],
            )
        )  # fmt: skip
    params[4::5] = [replace(FREE, seed=50 + i) for i in range(len(params[4::5]))]
    return prompts(len(params), 250, low=3, high=32, seed=5), params


PROMPTS, PARAMS = mix()

Said = list[tuple[list[int], str | None, Any]]


def said(llm: LLM, batch: Sequence[list[int]], params: Sequence[SamplingParams]) -> Said:
    """Each answer's tokens, its end and its log-probabilities, to the bit."""
    outputs = [o.outputs[0] for o in llm.generate(list(batch), list(params))]
    return [
        (o.token_ids, o.finish_reason, o.logprobs and [{t: p.logprob for t, p in row.items()} for row in o.logprobs])
        for o in outputs
    ]


# ---- the same bytes ---------------------------------------------------------------------------------

TREE = {"speculative_token_tree": "[(0,), (1,), (2,), (3,), (0, 0), (1, 0), (1, 1)]"}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    **{method: (method, {"num_speculative_tokens": 3}) for method in ("ngram", "standalone", "eagle3", "mtp")},
    "tree of standalone": ("standalone", TREE),
    "tree of eagle3": ("eagle3", TREE),
    "tree of ngram": ("ngram", TREE),
}
CHUNKS = {"max_num_batched_tokens": 16}
WAYS = (Way(0), Way(0, {"max_num_seqs": 3, "enforce_eager": True}), Way(0, CHUNKS, again=True), Way(0, SCARCE))
QUICK = [("ngram", WAYS[3]), ("standalone", WAYS[2]), ("eagle3", WAYS[0]), ("tree of standalone", WAYS[1])]


def drafting(checkpoints: Checkpoints, method: str, spec: dict[str, Any], **flags: Any) -> LLM:
    target, model = checkpoints
    given = {"method": method, **spec} | ({} if model is None else {"model": str(model)})
    return engine(target, speculative=SpeculativeConfig.parse(given), **flags)
