"""This host's part in its LANs: who answers ARP and NDP for an address, by the kernel alone.

Imports only what stands above it in `vipd.host`; only hosts that use `announce: l2` import it.
"""
