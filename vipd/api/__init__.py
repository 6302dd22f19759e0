"""The local API: HTTP and JSON over a UNIX socket (docs/api.md), one module for each resource, `*_routes`.

It may import every package except `cli` and `daemon`; only `daemon` imports it. vipctl's client is
`vipd.observe.api_client`.
"""
