"""Drafters propose tokens that the target verifies. The catalog lists them by name.

``base.py`` is the protocol. ``none.py``, ``standalone.py`` (a draft model), ``lookup/`` (n-gram and suffix), ``eagle/``
and ``mtp/`` are the methods, each with its checkpoint reader. The other files are shared: ``hidden.py`` (drafters over
the target's hidden states), ``unobserved.py`` (catch-up after a pause), ``quantization.py``, ``options.py`` and
``from_checkpoint.py`` (modules stored with the target).
"""
