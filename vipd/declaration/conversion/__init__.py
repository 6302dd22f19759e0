"""Configurations of other programs to services: ipvsadm-save, keepalived, HAProxy in tcp mode, nginx stream.

One module reads each format: its tokenizer makes *directives* (`directives.py`), its tables say which of them
are keys of a declaration, and these fill the *draft* of a service (`draft.py`). A problem names a directive
without a counterpart, a note one that needs none.
Pure. Only `vipctl convert` imports it, by `formats.convert_text`.
"""
