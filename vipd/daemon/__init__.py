"""The daemon itself: wires all parts together, handles signals, and notifies the service manager."""
