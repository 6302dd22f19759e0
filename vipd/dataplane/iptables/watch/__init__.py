"""Detects that another program changed vipd's rules, and decides when to repair. Start with `watcher.py`."""
