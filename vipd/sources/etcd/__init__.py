"""etcd as a source: a client over the JSON gateway, services and backends that follow its keys, and writes.

A *key* is one unit: a service, a backend that registered itself, or an override (`keys`, `values`). The
*store* is what etcd holds; its *revision* grows with each change, and each key has that of its last one
(`mod_revision`). The *source* lists the store at a revision and *watches* it from there on (`follow`); what
it knows is on disk. A key that is gone may be *held*: it serves on until somebody accepts
its removal. A *lease* ends with whoever renews it, and its keys with it (`leases`). README.md lists the
modules. `control`, `api` and `vipctl register` may import it.
"""
