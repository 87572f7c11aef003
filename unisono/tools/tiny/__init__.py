"""The bundled model's workshop: makes the text, trains the tokenizer and the model, measures the result.

``python -m unisono.tools.tiny.train --out DIR`` makes the checkpoint; ``python -m unisono.tools.tiny.evaluate DIR`` measures it with
transformers. ``data`` is importable without torch: ``unisono eval`` takes its held-out problems from there. The engine imports none of it.
"""
