"""This host besides its rules: settings, files, addresses, routes, sockets, programs, background tasks.

Imports `model` and `declaration`; all packages below may import it.
"""
