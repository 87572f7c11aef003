"""What a structured output may go on with: grammars compiled for a vocabulary, and where each request stands in it.

Owns all use of llguidance, which nothing imports before the first request that asks for a structured output. The engine
asks for a mask before each position is sampled; a mask is int32 words, bit i % 32 of word i // 32 allowing token i.
"""
