"""One file for each thing that a request may ask of a pass beside its tokens; ``base.py`` has the protocol.

The catalog lists them (``catalog.features``). Passes, scheduler, batches and the engine's loop iterate over that list
and know none by name.
"""
