"""Ranks of one model: processes, groups and gathers."""
