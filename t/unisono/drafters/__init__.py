"""Drafters propose what the target verifies. One file each, chosen by name from the catalog."""
