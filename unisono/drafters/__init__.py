"""Drafters propose tokens that the target verifies. One folder per method; the catalog lists them by name."""
