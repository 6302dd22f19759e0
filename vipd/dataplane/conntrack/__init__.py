"""The kernel's connection tracking table as a part of the state: flows to what does not serve any more end."""
