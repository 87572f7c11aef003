"""How the bundled model ``tiny-hybrid`` is made: a Qwen3.5-MoE of eight million parameters with an MTP module.

``python -m training.tiny_hybrid.train --out DIR --minutes 9`` trains and measures it on one GPU. ``documents`` adds
thinking to the text of ``training.tiny``; ``model`` and ``delta`` are the model in plain torch; ``checkpoint`` writes
it under the names of released checkpoints; ``evaluate`` measures it without the engine.
"""
