"""The read-only status page: one HTML file, the state as JSON, and a stream of what changes."""
