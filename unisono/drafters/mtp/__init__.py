"""Multi-token prediction (MTP, NEXTN): one module, several modules, and frozen-KV modules, with their checkpoints."""
