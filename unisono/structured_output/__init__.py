"""Structured outputs: grammars compiled for a vocabulary, and the token masks of each request.

Owns all use of llguidance, which is imported with the first request that has a structured output. The engine requests a
mask for each position before sampling; a mask is int32 words, bit i % 32 of word i // 32 allows token i.
"""
