"""Paged attention: kernels for prompts and rounds, in Triton and Gluon, with CPU twins."""
