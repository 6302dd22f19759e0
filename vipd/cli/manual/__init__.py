"""The manual pages, and the scripts by which shells complete `vipctl`, made of the program for its packages.

`python -m vipd.cli.manual DIR` writes all of them. Nothing of it runs in the daemon.
"""
