"""Numbers of services and backends: what is counted must be exact, whatever happens to the rules."""
