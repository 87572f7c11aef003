"""The passes that the engine runs on the device, as programs over buffers.

``extend.py`` computes prompt tokens; ``round.py`` takes every request from n committed tokens to n + 1 + a, where a
drafts were accepted; ``verify.py`` is what a round does after its drafts; ``features/`` has one file for each thing
that a request may ask of a pass beside its tokens. Imported by the engine; imports nothing of it.
"""
