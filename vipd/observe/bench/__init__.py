"""Measures the cost of programming the kernel and of connections on this host, in separate network
namespaces.

Only `vipctl bench` imports it.
"""
