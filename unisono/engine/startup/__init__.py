"""Start of an engine: memory, captured sizes, compilation of kernels, warm-up and the self-test of speculation."""
