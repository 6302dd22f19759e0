"""What Prometheus scrapes: GET /metrics on the API's socket, and over TCP where `metrics_address` says."""
