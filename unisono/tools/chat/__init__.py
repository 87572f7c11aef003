"""``unisono chat``: a conversation in a terminal or a pipe.

``session`` reads lines and runs commands, ``screen`` writes, ``offline`` and ``remote`` are the two sources of answers.
"""
