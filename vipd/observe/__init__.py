"""Shows what vipd and the kernel do: statistics, events, metrics, status page, explain, trace, rules, doctor.

`api`, `cli` and `daemon` may import it; `control` and packages above it may not.
"""
