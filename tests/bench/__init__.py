"""Measurements, printed and never asserted: `sudo .venv/bin/python -m tests.bench`."""
