"""How the bundled model ``tiny-gemma`` and its assistant are made: Gemma 4 26B-A4B with seven million parameters.

``python -m training.tiny_gemma.train --out DIR --minutes 7`` trains and measures both on one GPU, with the text and the
tokenizer of ``training.tiny``; ``--start DIR`` goes on from a directory that it wrote. ``model`` and ``assistant`` are
plain torch, ``checkpoint`` writes them under the names of released checkpoints, ``evaluate`` measures without the
engine.
"""
