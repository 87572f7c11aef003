"""Replicas: several copies of one engine behind one API process.

``client`` has the interface of one engine's client, ``router`` chooses the replica of a request, ``prefixes`` estimates
each replica's cache, ``devices`` assigns GPUs and CPU threads. The text does not depend on the replica.
"""
