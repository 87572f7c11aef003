"""Processes that compile grammars and compute masks."""
