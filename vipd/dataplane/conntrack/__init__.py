"""The kernel's connection tracking table as part of the state: flows to what no longer serves end."""
