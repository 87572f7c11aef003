"""Rounds of speculation: acceptance, trees, lookup drafts, and catching up."""
