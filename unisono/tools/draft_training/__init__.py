"""Draft heads from a target's own outputs: what ``unisono train-draft`` does.

The target answers prompts through the engine, then, batch by batch, shows its hidden states and logits, and the head
learns to foresee them as many tokens ahead as it will draft. The heads are those that serving runs
(``models/draft.py``, ``models/mtp.py``, ``models/decoder.py``): where a gradient is wanted, ops compute by a plain
formula (``kernels/library.py: differentiable``), and attention is an ``AttentionBackend`` of its own.

    data       prompts from a JSONL file          answers  what the target makes of them    batches  rows of tokens
    attention  causal attention with gradients    teacher  the target, looking on           draft    head, unroll, loss
    export     directories that others read       trainer  the loop, checkpoints, resume    measure  what serving sees
    command    the command line
"""
