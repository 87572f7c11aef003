"""Prompts to engine requests, and engine outputs to results; shared by LLM and the HTTP server."""
