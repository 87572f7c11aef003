"""Decoding of images and videos."""
