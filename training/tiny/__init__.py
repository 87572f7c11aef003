"""Makes the bundled model: generates its training text, trains tokenizer, model and draft heads, measures the result.

``python -m training.tiny.train --out DIR`` trains the checkpoint, ``python -m training.tiny.evaluate DIR`` measures it
with transformers, ``python -m training.tiny.heads --out DIR`` trains the draft heads. The installed package imports
nothing from here: ``unisono eval`` reads the held-out problems that ``training.tiny.problems`` wrote.

    stories    renders word problems       skeletons  problems written by hand   chains     problems composed of events
    data       training and test split     retell     rewords training text      documents  text in chat form
    tokenizer  byte-level BPE              batches    packs rows in parallel     model      Qwen3 in plain torch
    train      trains the model            evaluate   measures with transformers heads      trains the draft heads
    prompts    prompts for train-draft     problems   the file for unisono eval
"""
