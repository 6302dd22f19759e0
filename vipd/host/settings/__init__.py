"""The daemon's settings: what they are, where they come from, and their problems."""
