"""Measures the cost of programming the kernel: each trial is one process in a network namespace of its own.

The namespace has no name, so nothing must be removed; processor time and memory are those of the trial, and
iptables-legacy has a separate lock. The kernel ends every process with its parent. Time is that of the work
alone: services are created before it.
"""
