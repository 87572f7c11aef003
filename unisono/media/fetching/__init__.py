"""Fetching of images and videos: from URLs, files and data URIs, with limits."""
