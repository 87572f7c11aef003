"""Device passes of the engine, as programs over buffers.

``extend.py`` computes prompt tokens. ``round.py`` takes every request from n committed tokens to n + 1 + a, with a
accepted drafts. ``verify.py`` is the part of a round after drafting. ``features/`` has one file for each optional
request feature. Imported by the engine; imports nothing of it.
"""
