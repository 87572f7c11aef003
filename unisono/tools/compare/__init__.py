"""``unisono compare``: the first token in which two configurations differ, and the layer and op that made it differ.

``command`` is the command line and its report, ``trace`` records the results of every op of a run by position.
"""
