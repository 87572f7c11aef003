"""Python entry points: LLM, AsyncLLM, and the application for Ray Serve."""
