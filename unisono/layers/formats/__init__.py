"""Weight formats of linear layers and experts."""
