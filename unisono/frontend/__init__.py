"""Conversion of prompts to engine requests and of engine outputs to results; shared by LLM and the HTTP server."""
