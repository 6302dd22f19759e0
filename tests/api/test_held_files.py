"""Files that are empty or gone, without etcd: the API says what is held, and lets go of it."""

from __future__ import annotations

import signal
from subprocess import CompletedProcess

import pytest

from tests.api.daemon_process import host
from tests.lab.inside import Vipd, running
from tests.model.samples import block

DNS = block("10.96.0.10", "dns", "10.244.0.5")
WEB = block("10.96.0.11", "web", "10.244.0.6")


def test_what_is_held_is_shown_and_let_go_of() -> None:
    async def story(vipd: Vipd) -> None:
        nothing = await vipd.ask("POST", "/v1/accept-removal")
        assert (nothing.body["changed"], nothing.body["keys"], nothing.body["files"]) == (False, [], [])
        path = vipd.services_dir / "dns.yaml"
        path.write_text("")
        assert (await vipd.reload()).status == 422, "it says that not all could be taken"
        (source, *_) = (await vipd.status())["sources"]
        (refused,) = source["refused"]
        assert refused["serves"] == "the last good version of the file serves on"
        assert "vipctl accept-removal" in refused["problems"][0]
        services = {s["name"]: s["status"] for s in (await vipd.ask("GET", "/v1/services")).body["services"]}
        assert services["dns"]["message"].startswith("held: its file is empty")
        assert "held" not in services["web"]["message"]
        assert (await vipd.service("dns"))["status"] == services["dns"]
        dry = await vipd.ask("POST", "/v1/accept-removal?dry_run=1")
        assert (dry.body["changed"], dry.body["files"]) == (True, [str(path)])
        assert vipd.kernel.names() == {"dns", "web"}
        done = await vipd.ask("POST", "/v1/accept-removal")
        assert (done.body["changed"], done.body["applied"], done.body["files"]) == (True, True, [str(path)])
        assert vipd.kernel.names() == {"web"}

    def prepare(vipd: Vipd) -> None:
        vipd.declare(DNS, name="dns.yaml")
        vipd.declare(WEB, name="web.yaml")

    running(story, prepare)


@pytest.mark.root
def test_a_daemon_holds_what_all_files_together_no_longer_say() -> None:
    with host() as node:

        def vipctl(*words: str) -> CompletedProcess[str]:
            return node.run(*words, "--socket", str(node.socket), module="vipd.cli.main")

        node.declare("dns.yaml", DNS)
        node.declare("web.yaml", WEB)
        node.start()
        for path in list(node.services_dir.iterdir()):
            path.unlink()
        node.wait_for(lambda: "2 files are gone" in vipctl("status").stdout)
        assert "10.96.0.10" in node.rules()
        assert "10.96.0.11" in node.rules()
        listed = vipctl("list").stdout
        assert listed.count("held: its file is gone") == 2
        status = vipctl("status").stdout
        assert "in sync: the kernel has every rule\n" not in status
        assert "2 files are gone" in vipctl("events").stdout
        assert node.end(signal.SIGTERM) == 0
        checked = node.vipd("--check")
        assert (checked.returncode, "2 files are gone" in checked.stderr) == (1, True)
        once = node.vipd("--once")
        assert once.returncode == 1
        assert "10.96.0.10" in node.rules()
        node.start()
        accepted = vipctl("accept-removal")
        assert accepted.stdout.endswith("2 files let go\n"), accepted.stderr
        assert "10.96.0.10" not in node.rules()
        assert vipctl("accept-removal").stdout == "nothing was held\n"
