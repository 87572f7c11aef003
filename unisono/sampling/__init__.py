"""From logits to tokens: the pipeline that a target's and a drafter's logits go through alike.

Composes the ops of ``kernels/sampling/sampler.py``; called by the engine's programs and by drafters, inside a captured
pass, so nothing here synchronises with the host.
"""
