"""The command line `vipctl`: one module per family of verbs, imported when one of them is used.

A verb that talks to the daemon imports nothing of it: a start-up is felt at every call.
"""
