"""One module for each type of probe, after `base.py`; `checker` chooses one by the check's type."""
