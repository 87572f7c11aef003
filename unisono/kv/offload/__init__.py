"""KV offload to host memory and to files."""
