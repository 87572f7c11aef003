"""Text: tokenizer, chat templates, detokenizer, stop strings, reasoning and tool parsers."""
