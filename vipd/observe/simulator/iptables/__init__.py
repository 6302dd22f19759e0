"""The text of iptables-save and iptables-restore. Pure."""
