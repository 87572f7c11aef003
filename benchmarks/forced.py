"""Structured outputs with and without forced tokens as drafts.

    python -m benchmarks.forced tiny
    python -m benchmarks.forced benchmarks/shapes/qwen3-8b --tokenizer tiny --load-format dummy --batch 1 16 64

For each number of requests at once: tokens that a request commits in a verify pass, and tokens per second, without and
with forced tokens. The token ids of both must be equal; else it exits with 1. Weights may be random: what a grammar
forces does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from unisono import LLM, SamplingParams
from unisono.config.catalog import bundled
from unisono.types import SpeculativeConfig, StructuredOutputs

STRING = {"type": "string", "minLength": 3, "maxLength": 24, "pattern": "^[A-Za-z ]*$"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "contact": {
        "first_name": STRING,
        "last_name": STRING,
        "email_address": {"type": "string", "pattern": "^[a-z]{2,12}@example\\.com$"},
        "subscribed_to_newsletter": {"type": "boolean"},
    },
    "reading": {
        "temperature_celsius": {"type": "integer", "minimum": -40, "maximum": 60},
        "relative_humidity": {"type": "integer", "minimum": 0, "maximum": 100},
        "station_status": {"enum": ["operational", "degraded", "out_of_service"]},
    },
    "review": {
        "sentiment": {"enum": ["positive", "neutral", "negative"]},
        "confidence": {"enum": ["low", "medium", "high"]},
        "summary": STRING,
        "mentions_price": {"type": "boolean"},
        "mentions_delivery": {"type": "boolean"},
    },
}
TEXT = "Fill in the form for the following note. Anna measured 21 degrees at the station and was pleased. "


def form(properties: dict[str, Any]) -> StructuredOutputs:
    """An object with all of these properties and no blanks that a schema does not need."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return StructuredOutputs(json=schema, disable_any_whitespace=True)


def requests(count: int) -> tuple[list[str], list[SamplingParams]]:
    """Prompts and parameters; the first half is greedy, the rest is sampled."""
    forms = [form(properties) for properties in SCHEMAS.values()]
    params = [
        SamplingParams(
            temperature=0.0 if i < count / 2 else 1.0,
            seed=i,
            max_tokens=400,
            structured_outputs=forms[i % len(forms)],
        )
        for i in range(count)
    ]
    return [f"{TEXT}{i}" for i in range(count)], params


def measured(llm: LLM, count: int, repeats: int) -> tuple[list[list[int]], float, float]:
    """Token ids, tokens of a request per verify pass, and the median of tokens per second."""
    prompts, params = requests(count)
    llm.generate(prompts, params)  # compiles grammars, captures graphs
    rates, tokens = [], []
    for _ in range(repeats):
        llm.engine.reset_prefix_cache()
        before = llm.engine.runner.planner.passes.copy()
        begun = time.perf_counter()
        tokens = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        rates.append(sum(map(len, tokens)) / (time.perf_counter() - begun))
        passes = llm.engine.runner.planner.passes - before
    verified = sum(n for (program, _, _), n in passes.items() if program == "verify")
    return tokens, sum(map(len, tokens)) / max(1, verified) / min(count, len(tokens)), sorted(rates)[repeats // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokenizer")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--speculative-config", default='{"method": "none"}', help="JSON")
    parser.add_argument("--max-model-len", type=int, default=1024)
    args = parser.parse_args()
    speculative = SpeculativeConfig.parse(json.loads(args.speculative_config))
    given: dict[str, Any] = {
        "speculative": speculative,
        "load_format": args.load_format,
        "max_model_len": args.max_model_len,
        "max_num_seqs": max(args.batch),
    }
    if args.tokenizer:
        given["tokenizer"] = str(bundled.get(args.tokenizer, args.tokenizer))
    found: dict[int, list[tuple[float, float]]] = {n: [] for n in args.batch}
    answers: list[Any] = []
    for forced in (0, None):
        with LLM(args.model, max_forced_tokens=forced, **given) as llm:
            results = [measured(llm, n, args.repeats) for n in args.batch]
        answers.append([tokens for tokens, _, _ in results])
        for n, (_, a_pass, rate) in zip(args.batch, results, strict=True):
            found[n].append((a_pass, rate))
    print("| requests at once | tokens a pass: without, with | tokens/s: without, with | ratio |\n|---|---|---|---|")
    for n, ((few, slow), (many, fast)) in found.items():
        print(f"| {n} | {few:.2f}, {many:.2f} | {slow:.0f}, {fast:.0f} | {fast / slow:.2f} |")
    same = answers[0] == answers[1]
    print(f"token ids {'equal' if same else 'DIFFER'}")
    sys.exit(not same)


if __name__ == "__main__":
    main()
