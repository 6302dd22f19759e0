"""Which modules are mutated, which tests should catch it, and how many of the mutants a sample has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Target:
    """Modules that the same tests cover."""

    name: str
    modules: tuple[str, ...]
    """Files and folders, from the root of the project."""
    tests: tuple[str, ...]
    """Arguments for pytest, the most likely to fail first. Those marked `root` or `slow` are left out."""
    one_in: int
    """One of so many mutants is in a sample."""

    def files(self) -> list[str]:
        """The modules' paths from the root of the project."""
        found = [
            file
            for module in self.modules
            for file in (
                sorted((ROOT / module).glob("*.py")) if (ROOT / module).is_dir() else [ROOT / module]
            )
        ]
        return [str(file.relative_to(ROOT)) for file in found]


_IPTABLES = (
    "tests/dataplane/test_programs.py",
    "tests/dataplane/iptables/test_golden.py",
    "tests/dataplane/iptables/test_shape.py",
    "tests/dataplane/iptables/test_dispatch.py",
    "tests/dataplane/iptables/test_probability_chain.py",
    "tests/dataplane/iptables/test_names.py",
    "tests/dataplane/iptables/test_words.py",
    "tests/dataplane/iptables/test_failures.py",
    "tests/dataplane/iptables/test_growth.py",
    "tests/dataplane/iptables/test_ownership.py",
    "tests/dataplane/iptables/test_removal.py",
    "tests/dataplane/iptables/test_large_forwardings.py",
    "tests/dataplane/iptables/test_walks.py",
    "tests/observe/test_rule_words.py",
    "tests/observe/explain",
)
_NFTABLES = (
    "tests/dataplane/nftables",
    "tests/dataplane/test_programs.py",
    "tests/observe/test_rule_words.py",
    "tests/observe/simulator",
    "tests/observe/explain",
)
_DECLARATION = (
    "tests/declaration/test_native.py",
    "tests/declaration/test_kubernetes.py",
    "tests/declaration/test_kubernetes_documents.py",
    "tests/declaration/test_yaml_tree.py",
    "tests/declaration/test_conflicts.py",
    "tests/declaration/test_notation.py",
    "tests/declaration/test_operations.py",
    "tests/declaration/test_again.py",
    "tests/declaration/test_kubernetes_generated.py",
    "tests/health/test_body_pattern.py",
    "tests/limits/test_declarations.py",
    "tests/limits/test_others_json.py",
    "tests/cli/manual/test_sources.py",
)

TARGETS = (
    Target(
        "model",
        ("vipd/model",),
        (
            "tests/model",
            "tests/control/overrides/test_model.py",
            "tests/control/test_overrides.py",
            "tests/control/test_claim_limits.py",
            "tests/control/test_selection.py",
            "tests/health/test_targets.py",
            "tests/health/test_weights.py",
            *_DECLARATION,
            "tests/control/test_admission.py",
            "tests/cli/test_show.py",
            "tests/cli/test_hostile_text.py",
            "tests/dataplane/test_programs.py",
            "tests/limits/test_addresses.py",
            "tests/sources/test_state_files.py",
        ),
        one_in=16,
    ),
    Target("declaration", ("vipd/declaration",), _DECLARATION, one_in=40),
    Target(
        "selection",
        ("vipd/control/selection.py",),
        (
            "tests/control/test_selection.py",
            "tests/control/overrides/test_model.py",
            "tests/control/test_overrides.py",
            "tests/control/test_service_status.py",
            "tests/control/test_reconciler.py",
            "tests/control/test_change_path.py",
            "tests/control/test_backend_status_tracker.py",
        ),
        one_in=5,
    ),
    Target(
        "admission",
        ("vipd/control/address_policy.py", "vipd/control/claim_conflicts.py"),
        (
            "tests/control/test_admission.py",
            "tests/control/test_claim_warnings.py",
            "tests/control/test_claim_limits.py",
            "tests/control/test_admission_of_units.py",
            "tests/control/test_registrations.py",
            "tests/control/test_catalog.py",
            "tests/control/test_containment.py",
            "tests/limits/test_together.py",
        ),
        one_in=7,
    ),
    Target(
        "iptables",
        tuple(
            f"vipd/dataplane/iptables/{name}.py"
            for name in ("compile", "service_chains", "base_chains", "dispatch", "plan")
        ),
        _IPTABLES,
        one_in=10,
    ),
    Target(
        "nftables",
        tuple(
            f"vipd/dataplane/nftables/{name}.py"
            for name in ("compile", "chains", "base_chains", "plan", "maglev")
        ),
        _NFTABLES,
        one_in=10,
    ),
    Target(
        "stale flows",
        ("vipd/dataplane/conntrack/stale.py",),
        (
            "tests/dataplane/conntrack/test_stale.py",
            "tests/dataplane/conntrack/test_scheduler.py",
            "tests/dataplane/conntrack/test_resets.py",
        ),
        one_in=2,
    ),
    Target(
        "health",
        ("vipd/health/weights.py", "vipd/health/state.py"),
        (
            "tests/health/test_weights.py",
            "tests/health/test_state.py",
            "tests/health/test_memory.py",
            "tests/health/test_host_problems.py",
        ),
        one_in=3,
    ),
    Target(
        "removal guard",
        ("vipd/sources/removal_guard.py",),
        ("tests/sources/etcd/test_removal_guard.py", "tests/sources/etcd/test_keys.py"),
        one_in=1,
    ),
    Target(
        "permissions",
        ("vipd/api/peers.py",),
        ("tests/api/test_peers.py", "tests/api/test_server.py"),
        one_in=3,
    ),
)
