"""Large declarations."""

from __future__ import annotations


def many_services(count: int, backends: int = 5) -> str:
    """`count` services of one TCP port on 10.96.0.0/12, each with its own backends in 10.128.0.0/9."""
    blocks = [_service(index, backends) for index in range(count)]
    return "apiVersion: vipd/v1\nservices:\n" + "".join(blocks)


def _service(index: int, backends: int) -> str:
    addresses = ", ".join(_address(10, 128, index * backends + n) for n in range(backends))
    return (
        f"  - name: bench/web-{index}\n"
        f"    address: {_address(10, 96, index)}\n"
        f"    ports: [{{name: http, port: 80, protocol: tcp, target: 8080}}]\n"
        f"    backends: [{addresses}]\n"
    )


def _address(first: int, second: int, number: int) -> str:
    return f"{first}.{second + number // 64000}.{number // 250 % 256}.{number % 250 + 1}"
