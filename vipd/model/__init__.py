"""Values that all parts of vipd share: services, backends, checks, forwardings, overrides. Pure.

Imports nothing else of vipd; everything may import it.
"""
