"""The routes of the server, a file for each group.

``app`` adds them all.

A handler parses its body, starts generations and writes the answer; the work on text and tokens is in ``serving``,
``generation`` and ``answers``.
"""
