"""What the status page says: the document of its services, and nothing secret."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import vipd
from tests.lab.inside import Vipd, running
from tests.observe.page.declared import DEAD, declared
from tests.observe.watching import block, free_address, get, listening, state, until_state

SECRET = "hunter2"


def by_name(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {service["name"]: service for service in document["services"]}


def test_the_state_has_services_shares_and_health_but_no_secrets() -> None:
    checked = block(
        "web", 99, "10.244.0.5", more=f"check: {{type: http, path: '/health?token={SECRET}', interval: 1m}}"
    )

    async def story(vipd: Vipd) -> None:
        order = {"service": "shop/checkout", "backend": "10.244.2.17:8443", "admin": "draining"}
        assert (await vipd.ask("POST", "/v1/overrides", {**order, "reason": "kernel update"})).status == 200
        document = await until_state(
            vipd,
            lambda d: (d["daemon"]["state"], by_name(d)["shop/search"]["state"]) == ("in-sync", "degraded"),
        )
        services = by_name(document)
        assert {
            name: s["state"] for name, s in services.items() if s["state"] not in ("unchecked", "ok")
        } == {"mail/smtp": "no-backends", "shop/cache": "degraded", "shop/search": "degraded"}
        assert (services["shop/checkout"]["ready"], services["shop/checkout"]["backends"]) == (4, 5)
        (forwarding,) = services["shop/checkout"]["forwardings"]
        endpoints = {e["endpoint"]: e for e in forwarding["endpoints"]}
        assert endpoints["10.244.3.17:8443"]["share"] == pytest.approx(2 / 5)
        assert endpoints["10.244.2.17:8443"]["admin"] == "draining"
        assert "kernel update" in endpoints["10.244.2.17:8443"]["reason"]
        assert endpoints["10.244.2.17:8443"]["ready"] is False
        (forwarding,) = services["shop/search"]["forwardings"]
        (unhealthy,) = (e for e in forwarding["endpoints"] if e["health"] == "unhealthy")
        assert unhealthy["reason"] == "unhealthy: connection refused, 1 of 1"
        assert unhealthy["check"].startswith("connection refused")
        assert (document["daemon"]["host"], document["daemon"]["state"]) == ("host-a", "in-sync")
        assert "services-loaded" in [event["event"] for event in document["events"]]
        text = json.dumps(document)
        assert SECRET not in text
        assert "settings" not in document["daemon"]
        assert str(vipd.state_dir) not in text

    def prepare(vipd: Vipd) -> None:
        vipd.declare(declared(), checked)
        vipd.backends[DEAD] = "connection refused"

    running(story, prepare, status_page=free_address())


def test_it_follows_services_problems_and_warnings() -> None:
    async def story(vipd: Vipd) -> None:
        first = await state(vipd)
        vipd.declare(declared().replace("name: mail/smtp", "name: mail/imap"))
        vipd.declare("  - {name: x, adress: 10.96.9.9}\n", name="broken.yaml")
        vipd.kernel.warnings = ("nf_conntrack is 91 % full",)
        await vipd.reload()
        later = await until_state(vipd, lambda d: "mail/imap" in by_name(d))
        assert by_name(first).keys() - by_name(later).keys() == {"mail/smtp"}
        problems = [problem for source in later["daemon"]["sources"] for problem in source["problems"]]
        assert any("adress" in problem for problem in problems)
        assert later["events"][-1]["event"] in ("declaration-refused", "reloaded")
        vipd.kernel.refuses = lambda forwarding: "no module" if forwarding.key.service == "new" else ""
        vipd.declare(block("new", 98, "10.244.0.5"), name="broken.yaml")
        await vipd.reload()
        later = await until_state(vipd, lambda d: "new" in by_name(d))
        assert by_name(later)["new"]["state"] == "quarantined"
        assert "no module" in by_name(later)["new"]["message"]
        vipd.kernel.failures = 99 * [("iptables-restore", "no rules today")]
        vipd.declare()
        await vipd.reload()
        later = await until_state(vipd, lambda d: d["daemon"]["message"])
        assert "no rules today" in later["daemon"]["message"]
        assert (later["daemon"]["healthy"], later["daemon"]["state"]) == (False, "failed")

    running(story, lambda vipd: vipd.declare(declared()), status_page=free_address())


def test_it_shows_a_verdict_and_what_a_check_says_although_no_rule_changes() -> None:
    async def story(vipd: Vipd) -> None:
        await until_state(vipd, lambda d: len(d["services"]) == 13)
        vipd.backends["10.244.1.18:9200"] = "connection refused"
        await until_state(vipd, lambda d: by_name(d)["shop/search"]["ready"] == 2)
        vipd.backends["10.244.1.18:9200"] = "no route"
        document = await until_state(vipd, lambda d: "no route" in json.dumps(by_name(d)["shop/search"]))
        assert by_name(document)["shop/search"]["ready"] == 2

    def prepare(vipd: Vipd) -> None:
        vipd.declare(declared())
        vipd.backends[DEAD] = "connection refused"

    running(story, prepare, status_page=free_address())


def test_rates_are_of_new_flows_since_the_last_reading() -> None:
    async def story(vipd: Vipd) -> None:
        await state(vipd)
        vipd.kernel.new_flows = {
            ("shop/search", "10.244.1.18:9200"): 30,
            ("shop/search", "10.244.3.18:9200"): 10,
        }
        flows = (await until_state(vipd, lambda d: d["flows"]["services"]))["flows"]
        rate, _, backends, *_ = flows["services"]["shop/search"]
        assert rate > 0
        assert backends == {
            "shop/search/tcp/10.244.1.18:9200": pytest.approx(rate * 3 / 4, rel=0.01),
            "shop/search/tcp/10.244.3.18:9200": pytest.approx(rate / 4, rel=0.01),
        }
        document = await until_state(vipd, lambda d: not d["flows"]["services"])
        assert max(document["history"]["shop/search"]) == rate, (
            "the last minutes are there for who comes late"
        )

    running(story, lambda vipd: vipd.declare(declared()), status_page=free_address())


def test_the_page_comes_with_a_policy_that_lets_nothing_else_run() -> None:
    async def story(vipd: Vipd) -> None:
        page = await get(await listening(vipd, "status_page"))
        assert page.status == 200
        policy = page.headers["Content-Security-Policy"]
        assert "unsafe" not in policy
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert "connect-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert page.headers["X-Frame-Options"] == "DENY"
        assert page.headers["Cache-Control"] == "no-store"
        assert re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", page.text) == []
        assert re.findall(r"<[^>]+\s(?:on\w+|style)=", page.text.split("<script>")[0]) == []

    running(story, status_page=free_address())


def colours(html: str) -> list[dict[str, str]]:
    """The named colours of the light and the dark scheme."""
    blocks = re.findall(r":root \{(.*?)\}", html, re.DOTALL)
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6});", block)) for block in blocks)
    return [light, {**light, **dark}]


def luminance(colour: str) -> float:
    """WCAG's relative luminance."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio, 1 to 21."""
    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def test_contrast_is_enough_in_both_schemes() -> None:
    (html,) = Path(vipd.__file__).parent.rglob("status.html")
    texts, grounds = ("text", "quiet", "accent", "good", "warn", "bad"), ("page", "card", "sunken")
    pairs = [(text, ground) for text in texts for ground in grounds]
    pairs += [(kind, f"{kind}-soft") for kind in ("good", "warn", "bad", "accent")] + [("quiet", "line")]
    schemes = colours(html.read_text())
    contrasts = [(t, g, contrast(scheme[t], scheme[g])) for scheme in schemes for t, g in pairs]
    assert [(text, ground, number) for text, ground, number in contrasts if number < 4.5] == []
    assert all(contrast(scheme["strong-line"], scheme["card"]) >= 3 for scheme in schemes)
