"""OpenAI's Responses API: bodies to chat requests, pieces to items and events, and a bounded store of responses."""
