"""GGUF files (llama.cpp): their header, and the Hugging Face files that describe the same model."""
