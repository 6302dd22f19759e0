"""`vipctl rules`: trees, drawings, and real kernels."""
