"""Measures a checkpoint with transformers, independently of the engine: ``python -m training.tiny.evaluate PATH``.

The model answers the test split of ``data`` greedily. An answer is right when the number after ``####`` is right. The
command prints the accuracy by kind, the templates with most failures, and samples. It uses a GPU if there is one.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.tiny.data import KINDS, template_of, test_split
from training.tiny.stories import Problem
from unisono.tools.eval.problems import final_answer

CHATS = ("Hello", "who are you?", "What is speculative decoding?", "What is the capital of France?")
CONTINUATIONS = (
    "def fibonacci(n):",
    "import os\n\ndef read_config(path):\n",
    "class Stack:\n    def __init__(self):\n",
)


@dataclass(frozen=True)
class Report:
    """Accuracy from 0 to 1, in total and by kind. failures: (kind, problem, answer)."""

    problems: int
    accuracy: float
    by_kind: dict[str, float]
    failures: list[tuple[str, Problem, str]]


class Oracle:
    """A checkpoint in transformers that answers greedily in batches; bf16 on a GPU, fp32 on a CPU."""

    def __init__(self, path: str, device: str) -> None:
        self.device = device
        self.tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        self.model: Any = torch.nn.Module.to(model, device).eval()

    def chat(self, questions: list[str], max_new_tokens: int = 220) -> list[str]:
        """The answer to each question, as a conversation of one turn without a system prompt."""
        turns = [[{"role": "user", "content": question}] for question in questions]
        template = self.tokenizer.apply_chat_template
        return self.complete(
            [str(template(turn, tokenize=False, add_generation_prompt=True)) for turn in turns], max_new_tokens
        )

    @torch.inference_mode()
    def complete(self, prompts: list[str], max_new_tokens: int, batch: int = 256) -> list[str]:
        """The completion of each prompt."""
        texts: list[str] = []
        for start in range(0, len(prompts), batch):
            some = prompts[start : start + batch]
            inputs = self.tokenizer(some, return_tensors="pt", padding=True, add_special_tokens=False)
            inputs = {name: inputs[name].to(self.device) for name in ("input_ids", "attention_mask")}
            output = self.model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
            texts += self.tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return texts


def evaluate(oracle: Oracle, problems: int) -> Report:
    """Ask the first ``problems`` problems of the test split."""
    split = test_split(problems)
    answers = oracle.chat([problem.question for _, problem in split])
    failures = [
        (kind, problem, answer)
        for (kind, problem), answer in zip(split, answers, strict=True)
        if final_answer(answer) != problem.final_answer
    ]
    asked, wrong = Counter(kind for kind, _ in split), Counter(kind for kind, _, _ in failures)
    by_kind = {kind: 1 - wrong[kind] / asked[kind] for kind in KINDS if asked[kind]}
    return Report(problems, 1 - len(failures) / problems, by_kind, failures)


def print_report(report: Report, shown: int) -> None:
    """Print accuracies, the templates with most failures, and the first ``shown`` failures in full."""
    print(f"{report.problems} held-out problems, greedy: {report.accuracy:.1%} right")
    for kind, accuracy in report.by_kind.items():
        print(f"  {kind:12} {accuracy:6.1%}")
    print("most failures:", Counter(template_of(problem) for _, problem, _ in report.failures).most_common(12))
    for kind, problem, answer in report.failures[:shown]:
        print(f"--- {kind} {problem.template}\n{problem.question}")
        print(f"expected: {problem.worked_answer!r}\ngot:      {answer!r}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="checkpoint folder")
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--failures", type=int, default=12, help="failures to print in full")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    oracle = Oracle(options.path, options.device)
    report = evaluate(oracle, options.problems)
    print_report(report, options.failures)
    for question, answer in zip(CHATS, oracle.chat(list(CHATS)), strict=True):
        print(f">>> {question}\n{answer}")
    for prompt, text in zip(CONTINUATIONS, oracle.complete(list(CONTINUATIONS), 80), strict=True):
        print(f">>> continue\n{prompt}{text}")
    if options.json:
        figures = {"problems": report.problems, "accuracy": report.accuracy, **report.by_kind}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
