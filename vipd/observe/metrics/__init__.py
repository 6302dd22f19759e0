"""What Prometheus scrapes: GET /metrics on the API's socket, and over TCP where `metrics_address` says.

The API, the daemon and the status page (for `flows`) may import it.
"""
