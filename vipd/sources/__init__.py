"""Sources of declarations: files, the store of vipctl, etcd; and the overrides of operators.

Each source offers units (`vipd.declaration.unit`) and reports when they change. Imports `model`,
`declaration` and `host`; `control` and packages below it may import it.
"""
