"""Output, help texts and flag values that all commands share."""
