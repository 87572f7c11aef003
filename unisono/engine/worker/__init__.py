"""Workers: one rank's device state, the commands that change it, and the ranks of one model."""
