"""Mutation testing: breaks one thing at a time in a copy of the tree, and looks whether a test fails.

Run by hand (`python -m tests.mutation`), not in CI; tests/README.md says how. `mutants.py` makes the mutants,
`targets.py` says of which modules and which tests should catch them, `run.py` runs those, and `accepted.toml`
lists the survivors that change no behaviour.
"""
