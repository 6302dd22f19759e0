"""Looking at what runs: metrics, events, and the packet simulator."""
