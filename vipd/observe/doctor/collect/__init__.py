"""Collects facts about this host from files, programs and netlink. The only part of doctor that touches
anything, and it only reads."""
