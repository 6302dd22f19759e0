"""The daemon itself: wires all parts together, handles signals, and tells the service manager."""
