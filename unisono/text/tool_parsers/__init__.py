"""Tool calls: what requests offer, how models write calls, and how an answer is read back into calls.

``definitions`` reads a request's fields, ``formats`` lists the forms in which models write calls, one file each;
``structure`` says the same forms to the grammar engine, so that a required call cannot be anything else.
"""
