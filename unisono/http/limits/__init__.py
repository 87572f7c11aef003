"""Limits of connections, of request bodies, and of load.

Connections: ``connections.py``, with the numbers of ``sizes.py``. Bytes of a body: ``fields.py``, checked by
``routes/common.py``. Values of a body, before parsing: ``request_body.py``. Fields, paths and queries: ``fields.py``.
Queue, clients and bytes of waiting bodies: ``overload.py``.
"""
