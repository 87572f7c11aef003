"""The bundled model's workshop: makes the text, trains tokenizer and model, measures the result.

``python -m unisono.tools.tiny.train --out DIR`` makes the checkpoint, and ``python -m unisono.tools.tiny.evaluate DIR``
measures it with transformers. The engine imports none of it; ``unisono eval`` takes the held-out problems of ``data``,
which needs no torch.

    stories    a language for word problems      skeletons  those written by hand     chains     those composed
    data       training and test split           retell     other words for training  documents  the text, chat form
    tokenizer  byte-level BPE                    batches    packed rows, in parallel  model      Qwen3 in plain torch
    muon       the optimizer                     train      the one command           evaluate   the outside oracle
"""
