"""Programs that make what the package bundles. They run from a checkout and are not installed."""
