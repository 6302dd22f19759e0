"""HAProxy and nginx in the host's namespace, with the same services: a listener for each port of each VIP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.bench.path.programs import PORTS, PROCESSES
from tests.bench.path.rules import BACKENDS, VIPS, filler_backends, vip
from tests.lab.node import Node
from tests.lab.topology import ip
from tests.lab.waiting import wait_until

START_SECONDS = 120.0
NGINX_STREAM = "/usr/lib/nginx/modules/ngx_stream_module.so"


def start_haproxy(host: Node, services: int, directory: Path) -> None:
    """HAProxy in tcp mode, a thread for each core; returns once it listens."""
    lines = []
    for index, port, backends in _listeners(services):
        lines += [f"listen s{index}-{port}", f"  bind {vip(index)}:{port}", "  balance roundrobin"]
        lines += [f"  server b{n} {address}:{port}" for n, address in enumerate(backends)]
    options = [f"  nbthread {PROCESSES}", "  maxconn 2000"]
    run_haproxy(host, directory, options, lines, f"{vip(services - 1)}:{PORTS.throughput}", VIPS)


def run_haproxy(
    host: Node, directory: Path, options: list[str], listeners: list[str], last: str, vips: str
) -> None:
    timeouts = ("  timeout connect 5s", "  timeout client 90s", "  timeout server 90s")
    config = directory / "haproxy.cfg"
    config.write_text("\n".join(["global", *options, "defaults", "  mode tcp", *timeouts, *listeners, ""]))
    _start(host, last, vips, "haproxy", "-db", "-q", "-f", str(config))


def start_nginx(host: Node, services: int, directory: Path) -> None:
    """nginx's stream module, a worker for each core; UDP too at the first and the last VIP."""
    listening = services + 100
    lines = [
        f"load_module {NGINX_STREAM};",
        f"worker_processes {PROCESSES};",
        f"worker_rlimit_nofile {listening + 8000};",
        "daemon off;",
        f"pid {directory}/nginx.pid;",
        f"error_log {directory}/nginx.log crit;",
        f"events {{ worker_connections {listening + 4000}; }}",
        "stream {",
    ]
    for index, port, backends in _listeners(services):
        lines += _nginx_server(index, port, backends, "")
    for index in {0, services - 1}:
        lines += _nginx_server(index, PORTS.udp_echo, BACKENDS, " udp reuseport")
    config = directory / "nginx.conf"
    config.write_text("\n".join([*lines, "}", ""]))
    last = f"{vip(services - 1)}:{PORTS.throughput}"
    _start(host, last, VIPS, "nginx", "-p", str(directory), "-c", str(config), "-e", f"{directory}/nginx.log")


def _nginx_server(index: int, port: int, backends: tuple[str, ...], how: str) -> Iterator[str]:
    name = f"s{index}_{port}"
    yield f"upstream {name} {{ {' '.join(f'server {address}:{port};' for address in backends)} }}"
    yield f"server {{ listen {vip(index)}:{port}{how}; proxy_pass {name}; }}"


def _listeners(services: int) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    for index in range(services):
        real = index in (0, services - 1)
        for port in PORTS.tcp if real else (PORTS.closing,):
            yield index, port, BACKENDS if real else filler_backends(index)


def _start(host: Node, last: str, vips: str, *argv: str) -> None:
    ip("-n", host.namespace, "route", "add", "local", vips, "dev", "lo")
    process = host.start(*argv)

    def listens() -> bool:
        assert process.poll() is None, f"{argv[0]} ended with exit code {process.returncode}"
        return f"{last} " in host.run("ss", "-Hltn", f"sport = :{last.rpartition(':')[2]}").stdout

    wait_until(listens, f"{argv[0]} does not listen", START_SECONDS)
