"""Numbers of services and backends: new flows ever, flows now, their traffic where the kernel counts it."""
