"""Uses the drafter of this folder. Install it first: ``pip install ./examples/drafter``."""

from unisono import LLM, SamplingParams

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n"


def answer(method: str) -> tuple[str, float]:
    """The text, and the tokens a round."""
    spec = (
        {"method": method, "num_speculative_tokens": 3, "adaptive": False} if method != "none" else {"method": method}
    )
    with LLM("tiny", max_num_seqs=2, max_model_len=256, speculative_config=spec) as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        return output.outputs[0].text, llm.engine.counters.accept_length


if __name__ == "__main__":
    plain, _ = answer("none")
    drafted, length = answer("last_match")
    print(f"{length:.2f} tokens a round; same text: {drafted == plain}")
