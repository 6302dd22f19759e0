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


_DECLARATION = (
    "tests/declaration/test_native.py",
    "tests/declaration/test_kubernetes.py",
    "tests/declaration/test_kubernetes_documents.py",
    "tests/declaration/test_yaml.py",
    "tests/declaration/test_values.py",
    "tests/declaration/test_read_again.py",
    "tests/declaration/test_conflicts.py",
    "tests/declaration/test_dns_names.py",
    "tests/declaration/test_operations.py",
)
_DATAPLANES = (
    "tests/dataplane/test_one_of_each.py",
    "tests/dataplane/test_programs.py",
    "tests/observe/explain/test_golden.py",
)


def _in(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}.py" for name in names)


TARGETS = (
    Target(
        "model",
        _in("vipd/model", "service", "forwarding", "check", "limits", "formatting"),
        (
            "tests/model",
            "tests/declaration/test_native.py",
            "tests/declaration/test_dns_names.py",
            "tests/declaration/test_operations.py",
            "tests/declaration/test_yaml.py",
            "tests/declaration/test_read_again.py",
            "tests/limits/test_declarations.py",
            "tests/dataplane/test_programs.py",
            "tests/control/test_selection.py",
            "tests/health/test_weights.py",
            "tests/api/test_views.py",
            "tests/cli/test_screens.py",
        ),
        one_in=12,
    ),
    Target(
        "limits of claims",
        _in("vipd/model", "claim_limits", "check_target"),
        ("tests/model", "tests/control/test_claims.py", "tests/health/test_targets.py"),
        one_in=12,
    ),
    Target(
        "overrides",
        _in("vipd/model", "override", "backend_status", "text"),
        (
            "tests/model",
            "tests/control/overrides/test_model.py",
            "tests/control/test_overrides.py",
            "tests/cli/test_hostile_text.py",
        ),
        one_in=12,
    ),
    Target(
        "declaration",
        ("vipd/declaration",),
        (
            *_DECLARATION,
            "tests/declaration/test_kubernetes_generated.py",
            "tests/limits/test_declarations.py",
            "tests/limits/test_others_json.py",
            "tests/limits/test_etcd.py",
            "tests/health/test_body_pattern.py",
            "tests/cli/manual/test_sources.py",
            "tests/control/test_containment.py",
            "tests/dataplane/test_one_of_each.py",
        ),
        one_in=50,
    ),
    Target(
        "selection",
        ("vipd/control/selection.py",),
        (
            "tests/control/test_selection.py",
            "tests/control/overrides/test_model.py",
            "tests/api/test_views.py",
            "tests/control/test_steps.py",
        ),
        one_in=6,
    ),
    Target(
        "admission",
        _in("vipd/control", "address_policy", "claim_conflicts"),
        (
            "tests/control/test_claims.py",
            "tests/control/test_registrations.py",
            "tests/limits/test_together.py",
            "tests/control/test_catalog.py",
        ),
        one_in=9,
    ),
    Target(
        "iptables",
        _in("vipd/dataplane/iptables", "compile", "service_chains", "base_chains", "dispatch"),
        (
            *_in("tests/dataplane/iptables", "test_dispatch", "test_rules"),
            *_DATAPLANES,
            "tests/observe/explain/test_explain.py",
            "tests/observe/explain/test_dataplanes_agree.py",
        ),
        one_in=12,
    ),
    Target(
        "iptables plan",
        ("vipd/dataplane/iptables/plan.py",),
        (
            "tests/dataplane/test_programs.py",
            *_in("tests/dataplane/iptables", "test_failures", "test_growth", "test_walks", "test_ownership"),
        ),
        one_in=12,
    ),
    Target(
        "nftables",
        _in("vipd/dataplane/nftables", "compile", "chains", "balance_chain", "base_chains", "plan"),
        (
            *_in("tests/dataplane/nftables", "test_shape", "test_slots"),
            *_DATAPLANES,
            "tests/observe/explain/test_explain.py",
            "tests/observe/explain/test_dataplanes_agree.py",
        ),
        one_in=12,
    ),
    Target(
        "maglev",
        ("vipd/dataplane/nftables/maglev.py",),
        _in("tests/dataplane/nftables", "test_maglev", "test_slots", "test_shape"),
        one_in=8,
    ),
    Target(
        "stale flows",
        ("vipd/dataplane/conntrack/stale.py",),
        ("tests/dataplane/conntrack/test_stale.py", "tests/dataplane/conntrack/test_scheduler.py"),
        one_in=2,
    ),
    Target(
        "health",
        ("vipd/health/weights.py", "vipd/health/state.py"),
        (
            "tests/health/test_weights.py",
            "tests/health/test_state.py",
            "tests/health/test_memory.py",
            "tests/health/test_slow_start.py",
        ),
        one_in=3,
    ),
    Target(
        "removal guard",
        ("vipd/sources/removal_guard.py",),
        ("tests/sources/etcd/test_removal_guard.py", "tests/sources/etcd/test_removals.py"),
        one_in=1,
    ),
    Target(
        "permissions",
        ("vipd/api/peers.py",),
        ("tests/api/test_peers.py", "tests/api/test_server.py"),
        one_in=3,
    ),
    Target(
        "least connections",
        _in("vipd/control", "connection_shares", "connection_balancer"),
        _in("tests/control", "test_connection_shares", "test_connection_balancer"),
        one_in=4,
    ),
    Target(
        "names",
        (*_in("vipd/resolver", "answers", "backends", "saved_answers"), "vipd/control/named_backends.py"),
        (
            "tests/resolver/test_answers.py",
            "tests/control/test_named_backends.py",
            "tests/resolver/test_resolver.py",
            "tests/declaration/test_dns_names.py",
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
        (
            "tests/model/test_flow_limits.py",
            "tests/dataplane/test_one_of_each.py",
            "tests/dataplane/iptables/test_rules.py",
            "tests/dataplane/nftables/test_shape.py",
            "tests/declaration/test_limits.py",
        ),
        one_in=4,
    ),
    Target(
        "announced addresses",
        ("vipd/control/announcements.py", "vipd/model/maintenance.py"),
        ("tests/model/test_maintenance.py", "tests/control/test_announcements.py"),
        one_in=6,
    ),
    Target(
        "explain on a host",
        _in("vipd/observe/explain", "host_rules", "query", "rule_words"),
        (
            "tests/observe/explain/test_host_rules.py",
            "tests/observe/explain/test_foreign_rules.py",
            "tests/observe/explain/test_explain.py",
            "tests/observe/explain/test_api.py",
        ),
        one_in=6,
    ),
)
