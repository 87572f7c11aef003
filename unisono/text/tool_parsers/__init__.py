"""Tool calls: the formats in which models write calls, and their parsers.

``formats`` lists the formats, one file each; ``structure`` describes them to the grammar engine, so that a required
call has no other form. Qwen 2.5 and 3 write ``hermes``, Qwen3-Coder and Qwen3.5 ``qwen3_coder``.
"""
