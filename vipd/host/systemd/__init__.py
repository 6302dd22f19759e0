"""The daemon's side of systemd: notifications to the service manager, and fields of its journal."""
