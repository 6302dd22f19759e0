"""Services that show everything the page can show."""

from __future__ import annotations

from tests.observe.watching import QUICK

DEAD = "10.244.2.18:9200"
"""A backend of shop/search, which is checked."""
_SERVICES = f"""\
  - name: kube-system/kube-dns
    address: [10.96.0.53, "fd00:96::53"]
    ports:
      - {{port: 53, protocol: udp, name: dns}}
      - {{port: 53, name: dns-tcp}}
      - {{port: 9153, name: metrics}}
    backends: [10.244.0.5, {{address: 10.244.2.21, weight: 2}}, "fd00:244::5"]
  - name: shop/checkout
    address: 10.96.7.10
    ports: [{{port: 443, node_port: 30443}}]
    backends: ['10.244.1.17:8443', '10.244.2.17:8443', '10.244.3.17:8443@2', '10.244.4.17:8443',
               '10.244.5.17:8443']
  - name: shop/search
    address: 10.96.7.11
    ports: 80
    backends: ['10.244.1.18:9200', '{DEAD}', '10.244.3.18:9200', '10.244.4.18:9200']
    check: {QUICK}
  - {{name: mail/smtp, address: 10.96.9.25, ports: 25}}
  - name: shop/cache
    address: 10.96.7.12
    ports: 6379
    backends: [10.244.4.40, {{address: 10.244.9.9, state: down}}]
"""


def web(number: int) -> str:
    """One of many services that are alike."""
    suffix = f"{number // 250}.{number % 250 + 1}"
    backends = ", ".join(f"'10.{244 + n}.{suffix}:8080'" for n in range(3))
    return (
        f"  - {{name: team-{number % 7}/web-{number:04}, address: 10.96.{suffix}, ports: 80, "
        f"backends: [{backends}]}}\n"
    )


def declared() -> str:
    """A dozen of each kind."""
    return _SERVICES + "".join(map(web, range(8)))
