"""Weight formats of linear layers and experts.

``base.py`` has the protocol. ``config/catalog.py`` registers the formats, and ``config/preflight/quantization.py``
checks a checkpoint's ``quantization_config`` before torch is imported.
"""
