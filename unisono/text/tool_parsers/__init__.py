"""Tool calls: the formats in which models write calls, and their parsers.

``formats`` lists the formats, one file each; ``structure`` describes them to the grammar engine, so that a required
call has no other form.
"""
