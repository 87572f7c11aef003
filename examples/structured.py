"""Forces answers into a JSON schema, a regular expression, and one of several strings."""

import json

from unisono import LLM, SamplingParams, StructuredOutputs

SCHEMA = {
    "type": "object",
    "properties": {"item": {"enum": ["apples", "pears"]}, "count": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["item", "count"],
    "additionalProperties": False,
}
FORMS = {
    "schema": StructuredOutputs(json=SCHEMA),
    "expression": StructuredOutputs(regex=r"[1-9][0-9]{0,2} (apples|pears)"),
    "choice": StructuredOutputs(choice=["apples", "pears"]),
}

if __name__ == "__main__":
    with LLM("tiny", max_num_seqs=4, max_model_len=256) as llm:
        params = [SamplingParams(temperature=0, max_tokens=60, structured_outputs=form) for form in FORMS.values()]
        outputs = llm.generate(["Tom has"] * len(FORMS), params)
    for name, output in zip(FORMS, outputs, strict=True):
        print(f"{name}: {output.outputs[0].text}")
    print("count:", json.loads(outputs[0].outputs[0].text)["count"])
