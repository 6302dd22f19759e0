"""The read-only status page: one HTML file, the state as JSON, and a stream of changes.

Only the daemon imports it, through `vipd.observe.monitoring`.
"""
