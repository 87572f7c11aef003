"""Logits to tokens: the sampling pipeline shared by the target's and the drafter's logits.

Composes the ops of ``kernels/sampling/sampler.py``. The engine's programs and the drafters call it inside a captured
pass, so nothing here synchronises with the host.
"""
