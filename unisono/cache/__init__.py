"""The KV cache: pages and their owners (``pages``), the prefix tree (``radix``), the tensors (``kv``).

Host-side bookkeeping never touches the device: a page is an integer until the runner writes it into a
slot's page table. Only the engine calls in here.
"""
