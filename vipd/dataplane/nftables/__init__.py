"""The nftables dataplane: one table, whose maps contain the services."""
