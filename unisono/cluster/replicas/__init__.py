"""Replicas: several copies of one engine with one API process.

``client`` has the interface of one engine's client, ``router`` says which replica runs a request, ``prefixes`` knows
what each replica has cached, ``devices`` shares GPUs and processors out. Text does not depend on the replica.
"""
