"""Graphs: how a program is captured and replayed. Imports ``program`` and nothing else of the project."""
