"""Block drafters (DFlash, DFlash2, DSpark): all drafts of a round from one small pass, and their checkpoints."""
