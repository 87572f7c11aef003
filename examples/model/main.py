"""Serves a checkpoint of the family in this folder. Install it first: ``pip install ./examples/model``.

The checkpoint has a config.json only; ``load_format="dummy"`` gives it random weights.
"""

import json
import tempfile
from pathlib import Path

from unisono import LLM, SamplingParams

CONFIG = {
    "architectures": ["RippleForCausalLM"],
    "model_type": "ripple",
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 16,
    "tie_word_embeddings": False,
    "dtype": "float32",
}

if __name__ == "__main__":
    prompts = [[5, 77, 120, 31, 9], list(range(40, 80))]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        with LLM(folder, load_format="dummy", max_num_seqs=2, max_model_len=128) as llm:
            params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
            together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
            alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    print(together)
    print("same tokens alone:", alone == together)
