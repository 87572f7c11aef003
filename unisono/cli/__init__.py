"""The command line: commands, flags, help and output."""
