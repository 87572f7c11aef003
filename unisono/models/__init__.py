"""Models: families, blocks, loading, adapters and vision towers."""
