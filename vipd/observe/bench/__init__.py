"""Measuring what programming and connecting cost here, in network namespaces that vanish by themselves."""
