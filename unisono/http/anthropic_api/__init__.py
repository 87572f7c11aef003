"""Anthropic's Messages API: bodies to chat requests, pieces to content blocks and events, and its form of errors."""
