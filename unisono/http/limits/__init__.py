"""Limits of connections, request bodies and load."""
