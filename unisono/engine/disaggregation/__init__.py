"""Prefill and decode in separate engines: roles, services and the pages that they exchange."""
