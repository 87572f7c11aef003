"""OpenAI's API: request bodies, checks, and response objects."""
