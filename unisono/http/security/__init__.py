"""API keys, roles, allowed hosts, and secrets on the command line."""
