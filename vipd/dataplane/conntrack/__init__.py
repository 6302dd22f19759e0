"""The kernel's connection tracking table as part of the state: ends flows to backends that no longer
serve."""
