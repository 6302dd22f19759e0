"""The manual pages, and the scripts by which shells complete `vipctl`, made of the program for its packages.

`python -m vipd.manual DIR` writes all of them. Nothing of it runs in the daemon.
"""
