"""Which modules are mutated, which tests should catch it, and how many of the mutants a sample has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Target:
    name: str
    modules: tuple[str, ...]
    """Files and folders, from the root of the project."""
    tests: tuple[str, ...]
    one_in: int
    """One of so many mutants is in a sample."""
    marks: str = "not root and not slow"

    def files(self) -> list[str]:
        found = [
            file
            for module in self.modules
            for file in (
                sorted((ROOT / module).glob("*.py")) if (ROOT / module).is_dir() else [ROOT / module]
            )
        ]
        return [str(file.relative_to(ROOT)) for file in found]


def _in(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}.py" for name in names)


def _tests(names: str) -> tuple[str, ...]:
    """Folders of tests and files, which are named without their ending."""
    return tuple(f"tests/{name}{'.py' * ('test_' in name)}" for name in names.split())


TARGETS = (
    Target(
        "model",
        _in("vipd/model", "service", "forwarding", "check", "limits", "formatting"),
        _tests(
            "model declaration/test_native declaration/test_dns_names declaration/test_operations "
            "declaration/test_yaml declaration/test_read_again limits/test_declarations "
            "dataplane/test_programs control/test_selection health/test_weights api/test_views "
            "cli/test_screens"
        ),
        one_in=12,
    ),
    Target(
        "limits of claims",
        _in("vipd/model", "claim_limits", "check_target"),
        _tests("model control/test_claims health/test_targets"),
        one_in=12,
    ),
    Target(
        "overrides",
        _in("vipd/model", "override", "backend_status", "text"),
        _tests("model control/overrides/test_model control/test_overrides cli/test_hostile_text"),
        one_in=12,
    ),
    Target(
        "declaration",
        ("vipd/declaration",),
        _tests(
            "declaration/test_native declaration/test_kubernetes declaration/test_kubernetes_documents "
            "declaration/test_yaml declaration/test_values declaration/test_read_again "
            "declaration/test_conflicts declaration/test_dns_names declaration/test_operations "
            "declaration/test_kubernetes_generated limits/test_declarations limits/test_others_json "
            "limits/test_etcd health/test_body_pattern cli/manual/test_sources "
            "control/test_containment dataplane/test_one_of_each"
        ),
        one_in=50,
    ),
    Target(
        "selection",
        ("vipd/control/selection.py",),
        _tests("control/test_selection control/overrides/test_model api/test_views control/test_steps"),
        one_in=6,
    ),
    Target(
        "admission",
        _in("vipd/control", "address_policy", "claim_conflicts"),
        _tests("control/test_claims control/test_registrations limits/test_together control/test_catalog"),
        one_in=9,
    ),
    Target(
        "iptables",
        _in("vipd/dataplane/iptables", "compile", "service_chains", "base_chains", "dispatch"),
        _tests(
            "dataplane/iptables/test_dispatch dataplane/iptables/test_rules dataplane/test_one_of_each "
            "dataplane/test_programs observe/explain/test_golden observe/explain/test_explain "
            "observe/explain/test_dataplanes_agree"
        ),
        one_in=12,
    ),
    Target(
        "iptables plan",
        ("vipd/dataplane/iptables/plan.py",),
        _tests(
            "dataplane/test_programs dataplane/iptables/test_failures dataplane/iptables/test_growth "
            "dataplane/iptables/test_walks dataplane/iptables/test_ownership"
        ),
        one_in=12,
    ),
    Target(
        "nftables",
        (
            "vipd/dataplane/engine.py",
            *_in(
                "vipd/dataplane/nftables",
                "compile",
                "chains",
                "balance_chain",
                "base_chains",
                "table",
                "plan",
            ),
        ),
        _tests(
            "dataplane/nftables/test_prefixes dataplane/nftables/test_shape dataplane/nftables/test_slots "
            "dataplane/test_one_of_each "
            "dataplane/test_programs observe/explain/test_golden observe/explain/test_explain "
            "observe/explain/test_dataplanes_agree"
        ),
        one_in=12,
    ),
    Target(
        "maglev",
        ("vipd/dataplane/nftables/maglev.py",),
        _tests("dataplane/nftables/test_maglev dataplane/nftables/test_slots dataplane/nftables/test_shape"),
        one_in=8,
    ),
    Target(
        "stale flows",
        ("vipd/dataplane/conntrack/stale.py",),
        _tests("dataplane/conntrack/test_stale dataplane/conntrack/test_scheduler"),
        one_in=2,
    ),
    Target(
        "health",
        ("vipd/health/weights.py", "vipd/health/state.py"),
        _tests("health/test_weights health/test_state health/test_memory health/test_slow_start"),
        one_in=3,
    ),
    Target(
        "removal guard",
        ("vipd/sources/removal_guard.py",),
        _tests("sources/etcd/test_removal_guard"),
        one_in=1,
    ),
    Target(
        "permissions",
        ("vipd/api/peers.py",),
        _tests("api/test_peers api/test_server"),
        one_in=3,
    ),
    Target(
        "least connections",
        _in("vipd/control", "connection_shares", "connection_balancer"),
        _tests("control/test_connection_shares control/test_connection_balancer"),
        one_in=4,
    ),
    Target(
        "names",
        (*_in("vipd/resolver", "answers", "saved_answers"), "vipd/control/named_backends.py"),
        _tests(
            "resolver/test_answers control/test_named_backends resolver/test_resolver "
            "declaration/test_dns_names"
        ),
        one_in=6,
    ),
    Target(
        "limits on flows",
        (
            "vipd/model/flow_limits.py",
            "vipd/dataplane/iptables/limit_chain.py",
            "vipd/dataplane/nftables/limit_chain.py",
        ),
        _tests(
            "model/test_flow_limits dataplane/test_one_of_each dataplane/iptables/test_rules "
            "dataplane/nftables/test_shape declaration/test_limits"
        ),
        one_in=4,
    ),
    Target(
        "announced addresses",
        ("vipd/control/announcements.py", "vipd/model/maintenance.py"),
        _tests("model/test_maintenance control/test_announcements"),
        one_in=6,
    ),
    Target(
        "questions to explain",
        _in("vipd/observe/explain", "query", "rule_words"),
        _tests("observe/explain/test_explain observe/explain/test_api cli/test_screens"),
        one_in=6,
    ),
)
