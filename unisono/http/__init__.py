"""The HTTP server: OpenAI's, Anthropic's and SGLang's APIs, limits, metrics and the page."""
