"""Gathers between the GPUs of one host."""
