"""EAGLE, EAGLE-2 and EAGLE-3: draft heads over the target's hidden states, and their checkpoints."""
