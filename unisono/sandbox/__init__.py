"""Limited processes for work on untrusted input, and the channels to them."""
