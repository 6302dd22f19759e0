"""Notices that another program changed vipd's rules, and decides when to repair. Begin with `watcher.py`."""
