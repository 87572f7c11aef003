"""Trains ``tiny`` on sums with TRL's GRPOTrainer, twice, and gets the same losses and weights bit for bit.

Unisono samples the rollouts and a small draft model drafts them. After each step the trained weights replace those that
are served; the draft model learns from the rollouts, and its weights are replaced, too. Install TRL first: ``pip
install trl``.
"""

import argparse
import os
import random
import re
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from unisono import LLM, SamplingParams
from unisono.config.catalog import bundled

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func may change in later versions of TRL
GROUP, PROMPTS, RATE, DRAFT_RATE, NEW_TOKENS, TEMPERATURE = 4, 3, 3e-5, 1e-3, 24, 1.0


def questions(count: int) -> list[dict]:
    """Rows of a data set: conversations that ask for a sum, and the sum."""
    rng = random.Random(0)
    pairs = [(rng.randrange(10, 200), rng.randrange(10, 200)) for _ in range(count)]
    return [{"prompt": [{"role": "user", "content": f"What is {a} plus {b}?"}], "answer": a + b} for a, b in pairs]


def reward(completions: list, answer: list[int], **_: object) -> list[float]:
    """1 if the last number of a completion is the answer, and less the further it is from it; 0 without a number."""
    found = [re.findall(r"-?\d+", completion[0]["content"]) for completion in completions]
    return [1 / (1 + abs(int(n[-1]) - a) / 10) if n else 0.0 for n, a in zip(found, answer, strict=True)]


class Rollouts:
    """TRL's ``rollout_func``: pushes the trainer's weights, then samples GROUP completions of each prompt."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.step = llm, -1
        self.draft = AutoModelForCausalLM.from_pretrained(bundled["tiny-draft"], dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self.draft.parameters(), lr=DRAFT_RATE)

    def __call__(self, prompts: list, trainer: object) -> dict:
        step = trainer.state.global_step
        if step != self.step and step:
            self.llm.update_weights_from_tensor(trainer.model.named_parameters(), version=f"step-{step}")
            self.llm.update_weights_from_tensor(self.draft.named_parameters(), draft=True, version=f"step-{step}")
        self.step = step
        params = SamplingParams(
            n=GROUP, temperature=TEMPERATURE, seed=1000 * step, max_tokens=NEW_TOKENS, logprobs=0, ignore_eos=False
        )
        outputs = self.llm.chat(prompts[::GROUP], params, use_tqdm=False)
        rows = [(output.prompt_token_ids, one) for output in outputs for one in output.outputs]
        self._teach([(prompt, one.token_ids) for prompt, one in rows])
        drafted = sum(one.acceptance.num_draft_tokens for _, one in rows)
        accepted = sum(one.acceptance.num_accepted_draft_tokens for _, one in rows)
        print(
            f"step {step}: weights {self.llm.engine.weight_version}, {accepted} of {drafted} drafts accepted",
            flush=True,
        )
        return {
            "prompt_ids": [prompt for prompt, _ in rows],
            "completion_ids": [one.token_ids for _, one in rows],
            "logprobs": [
                [each[token].logprob for each, token in zip(one.logprobs, one.token_ids, strict=True)]
                for _, one in rows
            ],
        }

    def _teach(self, rows: list) -> None:
        """One step of cross-entropy: the draft model learns to continue prompts as the target did."""
        self._optimizer.zero_grad()
        for prompt, answer in rows:
            ids = torch.tensor([prompt + answer])
            logits = self.draft(ids).logits[0, len(prompt) - 1 : -1].float()
            (torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :]) / len(rows)).backward()
        self._optimizer.step()


def train(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train; returns the losses and the last weights of both models."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model = AutoModelForCausalLM.from_pretrained(bundled["tiny"], dtype=torch.float32)
    spec = {"method": "standalone", "model": "tiny-draft", "num_speculative_tokens": 3, "adaptive": False}
    flags = {"dtype": "float32", "max_num_seqs": GROUP * PROMPTS, "max_model_len": 128, "speculative_config": spec}
    with tempfile.TemporaryDirectory() as directory, LLM("tiny", **flags) as llm:
        config = GRPOConfig(
            output_dir=directory, max_steps=steps, per_device_train_batch_size=GROUP * PROMPTS, num_generations=GROUP,
            max_completion_length=NEW_TOKENS, temperature=TEMPERATURE, learning_rate=RATE, lr_scheduler_type="constant",
            beta=0.0, seed=0, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], logging_steps=1,
            save_strategy="no", disable_tqdm=True, full_determinism=True,
        )  # fmt: skip
        rollouts = Rollouts(llm)
        trainer = GRPOTrainer(
            model, reward, config, Dataset.from_list(questions(PROMPTS * steps)),
            processing_class=AutoTokenizer.from_pretrained(bundled["tiny"]), rollout_func=rollouts,
        )  # fmt: skip
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        weights = {**trainer.model.state_dict(), **{f"draft.{k}": v for k, v in rollouts.draft.state_dict().items()}}
        return losses, {name: weight.clone() for name, weight in weights.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    (first, weights), (second, others) = train(steps), train(steps)
    same = first == second and all(torch.equal(weight, others[name]) for name, weight in weights.items())
    print(f"losses {first}")
    print(f"two runs: {'the same losses and weights, bit for bit' if same else f'{first} and {second} DIFFER'}")


if __name__ == "__main__":
    main()
