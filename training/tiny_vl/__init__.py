"""The bundled model that sees, ``tiny-vl``, and its EAGLE-3 head ``tiny-vl-eagle3``: scenes, questions, training.

``python -m training.tiny_vl.train --out DIR`` trains both on one GPU; ``problems`` writes the held-out problems.
"""
