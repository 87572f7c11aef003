"""Sampling: logit edits, candidates, noise, and log-probabilities."""
