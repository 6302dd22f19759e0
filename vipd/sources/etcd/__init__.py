"""etcd as a source: its client over the JSON gateway, the format of its keys, and vipd's writes to it.

`client` and `source` are the interface; README.md lists the modules and names the pure ones. `control`,
`api` and `vipctl register` may import it.
"""
