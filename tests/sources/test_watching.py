"""Every save is seen by itself, whatever way it is made, and none waits for the reading of another file."""

from __future__ import annotations

import time

import pytest

from tests.model.samples import HEAD, block
from tests.sources.host import GOOD, OTHER, Host, QuickHost, chown, link_swap


def named(name: str) -> str:
    return HEAD + block("10.96.0.10", name, "10.244.0.5")


def sees(host: Host, *names: str) -> None:
    """Wait until just these services serve."""
    host.wait_until(host.names, set(names))


def test_twenty_saves_by_rename_are_seen_one_after_the_other(host: Host) -> None:
    for number in range(20):
        host.put("a.yaml", named(f"s{number}"))
        sees(host, f"s{number}")


def test_writes_in_place_new_files_and_deletions_are_seen(host: Host) -> None:
    path = host.services_dir / "a.yaml"
    path.write_text(GOOD)
    sees(host, "dns")
    with path.open("r+") as file:
        file.truncate()
        file.flush()
        time.sleep(0.1)  # an editor that takes its time
        file.write(OTHER)
    sees(host, "web")
    host.put("b.yaml", GOOD)
    sees(host, "web", "dns")
    path.rename(host.directory / "away.yaml")
    sees(host, "dns")
    host.remove("b.yaml")
    sees(host, "web", "dns")  # all files together are gone within ten seconds
    assert len(host.accept_removal()["files"]) == 2
    sees(host)


def test_a_swapped_link_inside_the_directory_is_seen(host: Host) -> None:
    link_swap(host.services_dir, "v1", GOOD)
    (host.services_dir / "a.yaml").symlink_to("..data/a.yaml")
    sees(host, "dns")
    for number, text in enumerate((OTHER, named("s3")), 2):
        link_swap(host.services_dir, f"v{number}", text)
        sees(host, "web" if number == 2 else "s3")


def test_a_directory_made_after_the_start_is_seen_with_every_later_save() -> None:
    host = QuickHost()
    host.services_dir.rmdir()
    directory = str(host.services_dir)
    host.config.write_text(host.config.read_text().replace(directory, f"{directory}/deeper"))
    with host:
        host.services_dir.mkdir()
        host.services_dir /= "deeper"
        host.services_dir.mkdir()
        for text, name in ((GOOD, "dns"), (OTHER, "web")):
            host.put("a.yaml", text)
            sees(host, name)


def test_a_removed_directory_is_seen_when_it_comes_back(host: Host) -> None:
    host.put("a.yaml", GOOD)
    sees(host, "dns")
    host.services_dir.rename(host.directory / "away")
    host.wait_until(lambda: "there is no such directory; hint: create it" in str(host.problems()), True)
    sees(host, "dns")
    host.services_dir.mkdir()
    host.put("a.yaml", OTHER)
    sees(host, "web")
    host.wait_until(host.problems, [])
    host.put("a.yaml", GOOD)
    sees(host, "dns")


@pytest.mark.parametrize("linked", [False, True], ids=["renamed", "linked"])
def test_a_directory_exchanged_for_another_is_seen_with_every_later_save(host: Host, *, linked: bool) -> None:
    host.services_dir.rmdir()
    for version, text in (("v1", GOOD), ("v2", OTHER)):
        (host.directory / version).mkdir()
        (host.directory / version / "a.yaml").write_text(text)
    if linked:
        host.services_dir.symlink_to("v1")
    else:
        (host.directory / "v1").rename(host.services_dir)
    sees(host, "dns")
    if linked:
        (host.directory / "link").symlink_to("v2")
        (host.directory / "link").rename(host.services_dir)
    else:
        host.services_dir.rename(host.directory / "old")
        (host.directory / "v2").rename(host.services_dir)
    sees(host, "web")
    host.put("a.yaml", named("s1"))
    sees(host, "s1")


def test_a_save_while_vipd_starts_is_seen() -> None:
    for number in range(5):
        with QuickHost() as host:
            host.put("a.yaml", named(f"s{number}"))
            sees(host, f"s{number}")


MANY = 4000
LARGE = HEAD + "".join(block(f"10.97.{n >> 8}.{n & 255}", f"s{n}", "10.244.0.5") for n in range(MANY))


@pytest.mark.root
def test_what_takes_long_to_read_delays_the_change_of_no_other_author(host: Host) -> None:
    """Three files of one author are saved before another's and come first by name. They are bad, so that
    nobody waits for the kernel."""
    for save in range(2):
        for number in range(3):
            chown(host.put(f"{number}.yaml", f"{LARGE}  - {{name: bad, bad{save}: 1}}\n"), 1234)
        host.put("z.yaml", named(f"z{save}"))
        seen = ""

        def served(save: int = save) -> bool:
            nonlocal seen
            seen = str(host.problems())
            return f"z{save}" in host.names()

        host.wait_until(served, True)
        assert f"bad{save}" not in seen, "it was read before"
        host.wait_until(lambda save=save: str(host.problems()).count(f"bad{save}"), 3)  # type: ignore[misc]
    assert host.names() == {"z1"}
