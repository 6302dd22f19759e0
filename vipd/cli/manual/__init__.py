"""The manual pages, the scripts by which shells complete `vipctl`, and the JSON Schemas by which editors do,
made of the program for its packages.

`python -m vipd.cli.manual DIR` writes all of them. Nothing of it runs in the daemon.
"""
