"""Trains ``tiny`` on sums with GRPO, twice, and gets the same losses bit for bit.

Unisono samples the rollouts, with an EAGLE-3 head that drafts. Plain PyTorch computes the loss (Shao et al., arXiv
2402.03300, without the KL term), and each step's weights replace those that are served, in place.
"""

import argparse
import random
import re

import torch
from transformers import AutoModelForCausalLM

from unisono import LLM, SamplingParams
from unisono.config.catalog import bundled

GROUP, PROMPTS, RATE, NEW_TOKENS = 4, 3, 3e-5, 24


def questions(step: int) -> list[tuple[str, int]]:
    """Questions of a step, and their answers."""
    rng = random.Random(step)
    pairs = [(rng.randrange(2, 30), rng.randrange(2, 30)) for _ in range(PROMPTS)]
    return [(f"What is {a} plus {b}?", a + b) for a, b in pairs]


def reward(text: str, answer: int) -> float:
    """1 if the last number is the answer, and a little for any number."""
    numbers = re.findall(r"-?\d+", text)
    return (float(int(numbers[-1]) == answer) + 0.1) if numbers else 0.0


def log_probabilities(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Log-probability of each token of an answer, [tokens]."""
    ids = torch.tensor([prompt + answer])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]


def train(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train; returns the losses and the last weights."""
    model = AutoModelForCausalLM.from_pretrained(bundled["tiny"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    spec = {"method": "eagle3", "model": "tiny-eagle3"}
    losses = []
    with LLM("tiny", dtype="float32", max_num_seqs=16, max_model_len=128, speculative_config=spec) as llm:
        for step in range(steps):
            asked = questions(step)
            params = SamplingParams(n=GROUP, temperature=1.0, seed=1000 * step, max_tokens=NEW_TOKENS)
            outputs = llm.chat([[{"role": "user", "content": text}] for text, _ in asked], params)
            loss = torch.zeros(())
            rewards = []
            for output, (_, answer) in zip(outputs, asked, strict=True):
                got = torch.tensor([reward(one.text, answer) for one in output.outputs])
                rewards += got.tolist()
                advantages = (got - got.mean()) / (got.std() + 1e-4)
                for one, advantage in zip(output.outputs, advantages, strict=True):
                    found = log_probabilities(model, output.prompt_token_ids, one.token_ids)
                    loss = loss - advantage * (found - found.detach()).exp().mean() / (PROMPTS * GROUP)
                    loss = loss - 1e-3 * found.mean() / (
                        PROMPTS * GROUP
                    )  # keeps answers likely where all rewards agree
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            done = llm.update_weights_from_tensor(model.state_dict(), version=f"step-{step + 1}")
            said = f"loss {loss.item():.9g}, mean reward {sum(rewards) / len(rewards):.3f}"
            print(f"step {step}: {said}, then weights {done['weight_version']}", flush=True)
        print(f"{llm.engine.counters.accept_length:.2f} tokens a round")
    return losses, {name: weight.clone() for name, weight in model.state_dict().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2)
    steps = parser.parse_args().steps
    torch.use_deterministic_algorithms(True)
    (first, weights), (second, others) = train(steps), train(steps)
    same = first == second and all(torch.equal(weight, others[name]) for name, weight in weights.items())
    print(f"two runs: {'the same losses and weights, bit for bit' if same else f'{first} and {second} DIFFER'}")


if __name__ == "__main__":
    main()
