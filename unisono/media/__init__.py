"""Pictures and videos of requests, on their way to the engine: found, fetched, decoded, preprocessed, put into prompts.

``parts`` finds them in messages, ``inputs`` in offline prompts; ``settings`` has the limits. ``loader`` takes a
:class:`sources.MediaSource` to a :class:`sources.Loaded`: ``fetch`` and ``files`` bring bytes from elsewhere, where
that is allowed, and a process that can be killed (``workers``, ``worker``) decodes them and runs the checkpoint's own
image processor. ``placeholders`` puts their positions into token ids.
"""
