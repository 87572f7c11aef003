"""Answers of the engine as HTTP responses: JSON objects and streams of server-sent events."""
