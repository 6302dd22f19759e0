"""The control loop: from what the sources say to what the dataplane writes, and what goes on beside it.

Imports everything from `model` to `dataplane`; `observe`, `api`, `cli` and `daemon` may import it.
"""
