"""The command line `vipctl`: one module for each verb or family of verbs, imported when one of them is used.

A verb that uses the daemon imports none of its parts, so that it starts fast; `manual` contains man pages
and completion. No other package imports this one.
"""
