"""Training of draft models on the outputs of a target model: ``unisono train-draft``.

First the engine lets the target answer prompts. Then the draft model is trained batch by batch: the target's forward
pass gives hidden states and logits, and the draft model learns to predict those logits as many tokens ahead as it will
draft. The modules are the ones that serving runs (``drafters/eagle/model.py``, ``drafters/mtp/model.py``,
``models/blocks/decoder.py``). Where a gradient is needed, ops use a differentiable formula (``kernels/library.py:
differentiable``) and attention uses an ``AttentionBackend`` in plain torch.

    data       reads prompts from JSONL       answers  generates and stores answers     batches  packs texts into rows
    attention  attention with gradients       teacher  the target's forward pass        draft    unrolling and loss
    methods    one class per draft method     export   writes checkpoint directories    trainer  loop, state, resume
    measure    acceptance in the engine       muon     the optimizer for matrices       command  the command line
"""
