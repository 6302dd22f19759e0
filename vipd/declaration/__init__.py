"""Text to a `Declaration`: services and every problem at once, from vipd/v1 and Kubernetes objects; and back.

Pure. Imports `model`; every other package may import it. `native.parse_declaration` is the way in.
"""
