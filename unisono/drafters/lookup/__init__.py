"""Drafters without weights: prompt lookup (n-gram) and suffix decoding."""
