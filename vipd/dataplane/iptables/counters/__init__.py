"""New flows for each endpoint, from the counters of the rules that translate to it.

A rule of the nat table sees only the first packet of a flow. When a chain is rewritten its counters restart
at zero; the kernel's notification of the deleted rule carries its last count, so nothing is lost.
"""
