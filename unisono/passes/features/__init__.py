"""Optional request features, one file each."""
