"""vipd: a layer-4 load balancer for plain Linux hosts."""

__version__ = "0.1.0"
