"""Images and videos of requests, from a message to the engine: found, fetched, decoded, preprocessed, placed in
prompts.

``parts`` finds them in messages, ``inputs`` in offline prompts; ``settings`` has the limits. ``loader`` turns a
:class:`sources.MediaSource` into a :class:`sources.Loaded`: ``fetching`` gets bytes from URLs and files, if allowed,
and a process with limits (``workers``, ``worker``) decodes them and runs the checkpoint's own image processor.
``placeholders`` puts their positions into token ids.
"""
