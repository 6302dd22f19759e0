"""etcd as a source: its client over the JSON gateway, the meaning of its keys, and what vipd writes there.

`client` and `source` are what others use; README.md lists the modules and says which are pure. `control`,
`api` and `vipctl register` may import it.
"""
