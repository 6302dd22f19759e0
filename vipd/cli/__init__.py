"""The command line `vipctl`: one module for each verb or family of verbs, imported when one of them is used.

A verb that talks to the daemon imports none of its parts, so that it starts fast; `manual` holds man pages
and completion. Nothing else imports this package.
"""
