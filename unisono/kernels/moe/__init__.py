"""Mixture of experts: router, placement of tokens, expert products by weight format, and the weighted sum."""
