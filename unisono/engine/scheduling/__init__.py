"""Scheduling: admission, prompt chunks, rounds, and the number of drafts of each round."""
