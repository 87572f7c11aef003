"""Metrics, latency history, traces and log notes of requests."""
