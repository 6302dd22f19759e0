"""`vipctl doctor`: `collect` gathers facts about this host, `checks` judge them.

A check is a pure function from `facts.Facts` to judgements; `diagnosis` runs them all. Nothing here
changes the host. To add a check: one function and one line in a file of `checks`.
"""
