"""JSON Schema as a grammar: rewriting, references, logic and refusals."""
