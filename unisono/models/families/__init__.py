"""Model families: one file each, from config.json to layer specs and tensor names."""
