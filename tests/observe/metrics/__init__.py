"""What Prometheus reads, judged by Prometheus' own tool."""
