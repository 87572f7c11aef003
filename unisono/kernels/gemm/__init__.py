"""Linear layers: 16-bit, fp8 and int4 products, and products fused with norms."""
