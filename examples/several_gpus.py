"""Runs one model on two ranks, and compares the text with one rank.

On a machine without GPUs the ranks are processes on the CPU. Ranks are processes, so the code that starts them stands
below ``if __name__ == "__main__"``.
"""

import torch

from unisono import LLM, SamplingParams

PROMPTS = ["def add(a, b):", "Tom has 3 boxes of"]


def answers(ranks: int) -> list[str]:
    device = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    params = [SamplingParams(temperature=t, seed=1, max_tokens=24) for t in (0, 1)]
    with LLM("tiny", tensor_parallel_size=ranks, device=device, max_num_seqs=2, max_model_len=256) as llm:
        return [output.outputs[0].text for output in llm.generate(PROMPTS, params)]


if __name__ == "__main__":
    one, two = answers(1), answers(2)
    for prompt, text in zip(PROMPTS, two, strict=True):
        print(repr(prompt), "->", repr(text))
    print("same text:", one == two)
