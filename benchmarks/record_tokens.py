"""Records what the engine answers to a fixed set of requests, so that a refactoring can be compared token by token.

    python -m benchmarks.record_tokens --out before.json
    python -m benchmarks.record_tokens --compare before.json

Every bundled drafter, chains and trees; greedy and sampled requests, penalties, biases, bad words, log-probabilities,
grammars, embeddings, returned hidden states; after prefix hits, in small chunks, and preempted. Token ids, and digests
of log-probabilities and hidden states, must be equal. Only the public interface is used, so old code can run it too.
Products on a CPU differ between processors: compare runs of one machine only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from typing import Any

import torch

from unisono import LLM, SamplingParams
from unisono.types import SpeculativeConfig, StructuredOutputs

TEXTS = [
    "Mia earns $12 an hour and works 5 hours a day for 3 days. She spends $45 on a gift. How much is left?",
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n",
    "Tom has 3 boxes of 12 pencils and gives 7 pencils away. How many pencils does Tom have?",
    "import os\nimport sys\n\n\ndef main():\n    for name in os.listdir(",
    "A train goes 60 miles an hour for 2 hours, then 40 miles an hour for 3 hours. How far does it go?",
    "1 2 3 4 5 6 7 8 9 10 1 2 3 4 5 6 7 8 9 10 1 2 3",
]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "logprobs": 3},
    {"temperature": 1.3, "top_k": 20, "repetition_penalty": 1.2},
    {"temperature": 0.9, "min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0.0, "bad_words": ("the", "and"), "logit_bias": {100: 5.0, 200: -5.0}},
    {"temperature": 0.8, "structured_outputs": StructuredOutputs(regex="[1-9][0-9]{0,3} (apples|pears), (yes|no)")},
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 1.0, "return_hidden_states": True},
]
TREE = {"topk": 2, "num_draft_tokens": 6}
METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "standalone": {"method": "standalone", "model": "tiny-draft"},
    "eagle": {"method": "eagle", "model": "tiny-eagle"},
    "eagle3": {"method": "eagle3", "model": "tiny-eagle3"},
    "mtp": {"method": "mtp", "model": "tiny-mtp"},
    "ngram tree": {"method": "ngram", **TREE},
    "standalone tree": {"method": "standalone", "model": "tiny-draft", **TREE},
    "eagle3 tree": {"method": "eagle3", "model": "tiny-eagle3", **TREE},
}
WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunks, scarce pages": {"max_num_batched_tokens": 48, "num_pages": 20, "max_num_seqs": 8},
}


def digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def requests(llm: LLM, count: int) -> tuple[list[Any], list[SamplingParams]]:
    """The same prompts and parameters for every engine."""
    rng = random.Random(1)
    assert llm.tokenizer is not None
    texts = [llm.tokenizer.encode(text) for text in TEXTS]
    hidden, vocab = llm.engine.checkpoint.config.hidden_size, llm.engine.checkpoint.config.vocab_size
    generator = torch.Generator().manual_seed(3)
    prompts: list[Any] = []
    for i in range(count):
        ids = [*texts[i % len(texts)], *(rng.randrange(vocab) for _ in range(rng.randrange(0, 40)))]
        prompt: Any = ids
        if i % 10 == 9:
            vectors = torch.randn((3, hidden), generator=generator) * 0.1
            prompt = {"prompt_token_ids": ids, "embedding_overrides": ([1, 2, 7], vectors)}
        prompts.append(prompt)
    params = [
        SamplingParams(**KINDS[i % len(KINDS)], seed=50 + i, max_tokens=20 + i % 13, ignore_eos=i % 4 == 0)
        for i in range(count)
    ]
    return prompts, params


def record(count: int, methods: list[str]) -> dict[str, Any]:
    """Answers by drafter and way; each answer is [token ids, digest of log-probabilities and hidden states]."""
    found: dict[str, Any] = {}
    for name in methods:
        spec = METHODS[name]
        for adaptive in (False, True) if spec is not None and "tree" not in name else (False,):
            for way, flags in WAYS.items():
                if adaptive and way != "batched":
                    continue
                given: dict[str, Any] = {"max_model_len": 256, **flags}
                if spec is not None:
                    k = {} if "topk" in spec else {"num_speculative_tokens": 3}
                    given["speculative"] = SpeculativeConfig.parse({**spec, **k, "adaptive": adaptive})
                with LLM("tiny", **given) as llm:
                    prompts, params = requests(llm, count)
                    answers = []
                    for _ in range(2):  # the second time prefixes are cached
                        for output in llm.generate(prompts, params):
                            first = output.outputs[0]
                            states = first.hidden_states
                            seen = None if states is None else states.float().sum(1).tolist()
                            answers.append([first.token_ids, digest((first.logprobs, output.prompt_logprobs, seen))])
                    label = f"{name}, {way}{', adaptive' if adaptive else ''}"
                    found[label] = answers
                    preempted = llm.engine.scheduler.preemptions
                    hits = llm.engine.scheduler.prefix_hits
                    print(f"{label}: {len(answers)} answers, {preempted} preemptions, {hits} cached tokens", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write the answers here, JSON")
    parser.add_argument("--compare", help="answers of another run, JSON; exit 1 where one differs")
    parser.add_argument("--requests", type=int, default=12, help="prompts for each engine")
    parser.add_argument("--methods", default=",".join(METHODS), help="drafters, comma-separated")
    args = parser.parse_args()
    found = record(args.requests, args.methods.split(","))
    total = sum(map(len, found.values()))
    if args.out:
        with open(args.out, "w") as file:
            json.dump(found, file)
    if args.compare:
        with open(args.compare) as file:
            before = json.load(file)
        differ = [
            (name, i)
            for name, answers in found.items()
            for i, (old, new) in enumerate(zip(before[name], json.loads(json.dumps(answers)), strict=True))
            if old != new
        ]
        print(f"{len(differ)} of {total} answers differ{': ' + str(differ[:8]) if differ else ''}")
        sys.exit(bool(differ))
    print(f"{total} answers")


if __name__ == "__main__":
    main()
