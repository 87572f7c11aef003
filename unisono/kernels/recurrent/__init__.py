"""Recurrent mixers: Gated DeltaNet and causal convolutions."""
