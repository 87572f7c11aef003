"""Kernels that write keys and values to pages: rotary embedding, e4m3 pages, page copies."""
