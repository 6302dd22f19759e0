"""The metrics for Prometheus: GET /metrics on the API's socket, and over TCP at `metrics_address`.

The API, the daemon and the status page (for `flows`) may import it.
"""
