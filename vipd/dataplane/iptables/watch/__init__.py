"""Seeing that somebody else changed our rules, and deciding when to repair. `door.Watch` is the way in."""
