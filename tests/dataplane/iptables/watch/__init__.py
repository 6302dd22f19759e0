"""Tests of `vipd.dataplane.iptables.watch`."""
