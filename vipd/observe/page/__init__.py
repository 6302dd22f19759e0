"""The read-only status page: one HTML file, and the state as JSON.

Only the daemon imports it, through `vipd.observe.monitoring`.
"""
