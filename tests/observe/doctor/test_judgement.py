"""What the doctor makes of facts, and that no remedy it prints harms."""

from __future__ import annotations

import re

from tests.lab.inside import Finding, judged
from tests.observe.doctor.cases import ANNOUNCING, CASES, OTHERS
from tests.observe.doctor.facts import STATUS, faults, found, ruleset, status, well


def test_what_facts_mean() -> None:
    wrong = {name: seen for name, (facts, expected) in CASES.items() if (seen := faults(facts)) != expected}
    assert wrong == {}


def test_a_check_that_fails_leaves_the_others() -> None:
    """Here by a status that no daemon of this version sends."""
    findings = judged(well(daemon=status(names=7)))
    failed = {finding.id: finding.cause for finding in findings if finding.severity == "unchecked"}
    assert failed.keys() == {"name-servers", "names"}
    assert all(cause.startswith("this check itself failed: ") for cause in failed.values())
    assert {finding.id for finding in findings} == {finding.id for finding in judged(well())}


FATES = {
    "-A FORWARD -j VIPD-FORWARD\n-A FORWARD -j DROP": "",
    "-A FORWARD -j DROP\n-A FORWARD -j VIPD-FORWARD": "problem",
    '-A FORWARD -m comment --comment "no -j ACCEPT here" -j REJECT --reject-with x': "problem",
    "-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT": "problem",
    "-A FORWARD -i eth0 -j ACCEPT": "warning",
    "-A FORWARD -i eth0 -j ACCEPT\n-A FORWARD -j DROP": "warning",
    "-A FORWARD -m conntrack --ctstate DNAT -j ACCEPT": "",
    "-A FORWARD -j ACCEPT": "",
    "-A FORWARD -i eth0 -j DROP": "problem",
    "-A FORWARD -i eth0 -j DROP\n-A FORWARD -j VIPD-FORWARD": "",
    "-A FORWARD -m quota --quota 5 -j DROP\n-A FORWARD -j VIPD-FORWARD": "",
}
"""Rules in FORWARD, whose policy is DROP -> how bad that is for flows to virtual IPs."""


def test_the_fate_of_a_flow_in_forward() -> None:
    own = ":VIPD-FORWARD - [0:0]\n-A VIPD-FORWARD -m connmark --mark 0x2000/0x2000 -j ACCEPT"
    saved = f"*filter\n:FORWARD DROP [0:0]\n{own}\n{{}}\nCOMMIT\n"
    # Without vipd's rules in the kernel its accept would be on its way.
    setting = {"accept_forwarded": False}
    seen = {
        rules: faults(well(settings=setting, rulesets=[ruleset(saved.format(rules))])).get(
            "forward-policy", ""
        )
        for rules in FATES
    }
    assert seen == FATES


def test_a_password_that_goes_unencrypted_is_told_once_with_and_without_a_daemon() -> None:
    etcd = {"endpoints": ["http://192.0.2.1:2379"], "user": "u", "password_file": "/pw"}
    silent = {"status": {}, "fault": "no answer"}
    causes = [f.cause for f in found(well(settings={"etcd": etcd}, daemon=silent), "settings")]
    assert ["goes unencrypted to http://192.0.2.1:2379" in cause for cause in causes] == [True]
    facts = well(settings={"etcd": etcd}, daemon={"status": {**STATUS, "warnings": causes}})
    assert sum("unencrypted" in finding.cause for finding in judged(facts)) == 1


TITLES = {
    "a table with another name": "vipd's routing table has another name",
    "routes of others in the table": "others have routes in vipd's routing table",
    "packets looked up in the table": "packets are looked up in vipd's routing table",
    "FRR does not import": "FRR does not import vipd's table",
    "nobody announces": "nobody announces the addresses",
    "the last host": "203.0.113.10 is announced without a backend",
}


def test_faults_of_announcing_have_titles_of_their_own() -> None:
    assert {name: worst(name).title for name in TITLES} == TITLES
    assert faults(well(announcing=ANNOUNCING | {"routes": 0, "looked_up": True})) == {}


def worst(name: str) -> Finding:
    """The first finding of a case."""
    return judged(CASES[name][0])[0]


HARMFUL = re.compile(
    r"\b(?:kill|pkill|killall|systemctl (?:stop|disable|mask|kill)|reboot|shutdown|halt|rm|mv|dd|mkfs|fsck)\b"
    r"|\b(?:flush|destroy|cleanup|purge|autoremove|remove)\b"
    r"|tables(?:-nft|-legacy)?(?: -t \S+)? -[FXZDPR]\b|tables\S*-restore"
    r"|\bnft (?:delete|flush|destroy|reset)\b"
    r"|\bip (?:-\d )?(?:address|addr|route|link|neighbour|rule) (?:del|delete|flush|change|replace)\b"
    r"|\bip link set \S+ down\b|\bremount\b|bridge-nf-call|\bmodprobe -r\b|\brmmod\b"
)
"""What may end traffic, a program, or somebody's data."""


def test_no_command_harms() -> None:
    commands = [command for facts, _ in CASES.values() for f in judged(facts) for command in f.mend]
    assert [command for command in commands if HARMFUL.search(command)] == []


def test_no_command_takes_another_hosts_address() -> None:
    for name, taken in {
        "addresses of others": set(OTHERS),
        "an address of a backend": {"10.96.0.50"},
    }.items():
        findings = judged(CASES[name][0])
        (foreign,) = [finding for finding in findings if finding.id == "vip-foreign"]
        assert "give the service another address" in foreign.hint
        words = {word for f in findings for command in f.mend for word in re.split(r"[\s/]", command)}
        assert not taken & words, name


def test_commands_that_need_care() -> None:
    """Router advertisements stay; a bridge's port of hardware keeps its way of working."""
    forwarding = found(CASES["a router by advertisements that does not forward IPv6"][0], "ip-forward")
    assert [finding.mend for finding in forwarding] == [
        ("sysctl -w net/ipv6/conf/eth1/accept_ra=2", "sysctl -w net/ipv6/conf/all/forwarding=1")
    ]
    (hairpin,) = found(CASES["a bridge without hairpin"][0], "bridge-hairpin")
    assert hairpin.mend == ("ip link set p1 type bridge_slave hairpin on",)


def test_every_check_that_can_mend_was_asked() -> None:
    """A remedy that no case brings about would be judged by nobody."""
    findings = [finding for facts, _ in CASES.values() for finding in judged(facts)]
    mended = {finding.id for finding in findings if finding.mend}
    spoken = {finding.id for finding in findings if finding.severity in ("problem", "warning")}
    assert {"settings", "daemon-running", "store", "vip-in-subnet", "vip-route", "rules-twice"} <= mended
    assert {"ip-forward", "ipv6-disabled"} <= mended
    every = [finding.id for finding in judged(well())]
    silent = {"kernel", "firewalls", "nft", "rules-readable", "network-readable"}
    on_a_host = {"flow-offload", "ipvs", "backend-policy-route", "backend-contact", "backend-neighbour"}
    on_a_host |= {"backend-mtu", "local-backend", "node-port-taken", "bridge-replies", "forward-chains"}
    on_a_host |= {"other-vipd", "mixed-variants", "foreign-claims"}
    on_a_host |= {"refused-declarations", "quarantined", "socket-permissions"}
    assert set(every) - spoken == silent | on_a_host
