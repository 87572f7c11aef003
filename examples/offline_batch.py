"""Answers many questions in one batch, with drafts and without: the text is the same."""

from unisono import LLM, SamplingParams

QUESTIONS = [
    "Mia earns $12 an hour and works 5 hours a day for 3 days. She spends $45. How much money does she have left?",
    "Tom has 3 boxes of 4 pens. He gives 5 pens away. How many pens does he have left?",
    "Anna reads 20 pages a day for 6 days. The book has 150 pages. How many pages are left?",
]


def answers(method: str) -> list[str]:
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = [SamplingParams(temperature=t, seed=1, max_tokens=60) for t in (0, 0, 0.7)]
    spec = {"method": method} | ({"model": "tiny-eagle3"} if method == "eagle3" else {})
    with LLM("tiny", max_num_seqs=4, max_model_len=256, speculative_config=spec) as llm:
        outputs = llm.chat(conversations, params)
        print(f"{method}: {llm.engine.counters.accept_length:.2f} tokens a round")
        return [output.outputs[0].text for output in outputs]


if __name__ == "__main__":
    plain, drafted = answers("none"), answers("eagle3")
    for question, text in zip(QUESTIONS, plain, strict=True):
        print(question, "->", repr(text))
    print("same text:", plain == drafted)
