"""The local API: HTTP and JSON over a UNIX socket (docs/api.md). `client` is stdlib only, for vipctl."""
