"""How a backend is asked: one file per kind of probe, after `base.py`."""
