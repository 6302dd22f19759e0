"""A fleet of hosts fed by one etcd: what a daemon does there beside following it, and registering backends.

Imported only where etcd is configured. `door` is what the daemon uses.
"""
