"""Streams several answers at once. The streams share one engine and one batch."""

import asyncio

from unisono import AsyncLLM, RequestOutputKind, SamplingParams

PROMPTS = {"code": "def add(a, b):", "maths": "Tom has 3 boxes of"}


async def stream(llm: AsyncLLM, name: str, prompt: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, output_kind=RequestOutputKind.DELTA)
    async for output in llm.generate(prompt, params, request_id=name):
        print(f"{name}: {output.outputs[0].text!r}")


async def main() -> None:
    with AsyncLLM("tiny", max_num_seqs=4, max_model_len=256) as llm:
        await asyncio.gather(*(stream(llm, name, prompt) for name, prompt in PROMPTS.items()))


if __name__ == "__main__":
    asyncio.run(main())
