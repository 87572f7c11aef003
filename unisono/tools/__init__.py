"""Commands for users: bench, chat, compare, eval, train-draft."""
