"""Health checks: probes, their schedule, the state of each backend, weights by answers and slow start.

`checker` is the interface for the rest of vipd. Imports `model`, `declaration` and `host`; `control` and
packages below it may import it.
"""
