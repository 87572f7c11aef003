"""The routes of the server, a file for each group. ``app`` adds them all.

A handler parses its body, starts generations and words the answer; what they do with text and tokens lives in
``serving``, ``generation`` and ``answers``.
"""
