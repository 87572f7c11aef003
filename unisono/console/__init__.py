"""Output, help texts and flag values, shared by all commands."""
