"""The nftables dataplane: a table of its own, whose maps hold the services."""
