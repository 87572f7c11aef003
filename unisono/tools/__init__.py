"""Commands of users: bench, chat, compare, eval, train-draft."""
