"""Measures what programming the kernel and connecting cost on this host, in network namespaces of its own.

Only `vipctl bench` imports it.
"""
