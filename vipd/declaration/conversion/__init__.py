"""Configurations of other programs to services: ipvsadm-save, keepalived, HAProxy in tcp mode, nginx stream.

One module reads each format. A problem names what could not be converted, a note what need not be.
Pure. Only `vipctl convert` imports it, by `formats.convert_text`.
"""
