"""The control loop: from the sources' declarations to the dataplane's writes, with its background tasks.

Imports everything from `model` to `dataplane`; `observe`, `api`, `cli` and `daemon` may import it.
"""
