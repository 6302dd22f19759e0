"""An etcd v3 client over the JSON gateway. Knows keys, values and revisions, and nothing of services.

`client` is what others use. `messages` and `replies` are pure: JSON in, values or typed errors out.
"""
