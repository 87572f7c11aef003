"""Chat templates: rendering with limits, and the roles and tools that a template supports."""
