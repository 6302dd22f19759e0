"""The daemon's settings: their definition, the layers they are read from, and the texts of their problems.

Imports `vipd.model`, `vipd.declaration` and `vipd.host`; every part of the daemon may import it.
`settings_file` alone needs no pydantic, for verbs of vipctl that must start fast.
"""
