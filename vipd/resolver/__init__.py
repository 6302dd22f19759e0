"""Backends' DNS names: lookups, their schedule, and the answers that serve.

`control` may import it, and whatever stands below that; it imports only `model`, `declaration` and `host`.
"""
