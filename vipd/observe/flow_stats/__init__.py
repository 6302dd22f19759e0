"""Statistics of services and backends: new flows in all, open flows, and traffic where the kernel counts it.

The API, the metrics, the status page and the daemon may import it.
"""
