"""The state directory: present, writable, not full, with readable content. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vipd.model.limits import STATE_DIR_FULL_BYTES, STATE_DIR_LOW_BYTES
from vipd.observe.doctor.facts import Facts
from vipd.observe.doctor.finding import Check, CheckResult, problem, warning

GROUP = "State directory"
RESTART = "systemctl restart vipd"
_OTHERS_WRITE = 0o022


def check_directory(facts: Facts) -> Iterator[CheckResult]:
    """vipd writes changes and its record there before it acts."""
    state = facts.state
    if state.fault:
        return
    if not state.exists:
        if facts.daemon.runs:
            cause = f"{state.path} is gone while vipd runs: changes by vipctl fail"
            yield problem("there is no state directory", cause, f"mkdir -m 0750 {state.path}", RESTART)
        return
    if state.read_only:
        cause = f"the file system of {state.path} is mounted read-only: changes by vipctl fail"
        hint = (
            f"find out why (dmesg): a kernel that finds a broken disk does so to save it; else remount it: "
            f'mount -o remount,rw "$(findmnt -n -o TARGET -T {state.path})"'
        )
        yield problem("the state directory cannot be written", cause, hint=hint)
    elif facts.root and not state.writable:
        cause = f"{state.path}: changes by vipctl fail"
        yield problem("the state directory cannot be written", cause, f"chattr -i {state.path}")
    if state.mode & _OTHERS_WRITE:
        cause = f"{state.path} has the mode {state.mode:04o}: who writes there decides where traffic goes"
        yield problem("others may write to the state directory", cause, f"chmod 0750 {state.path}")


def check_space(facts: Facts) -> Iterator[CheckResult]:
    """Each change is written to disk before it is answered."""
    state = facts.state
    if state.fault or not state.exists or (state.free > STATE_DIR_LOW_BYTES and state.free_inodes > 0):
        return
    full = state.free < STATE_DIR_FULL_BYTES or state.free_inodes <= 0
    left = f"{state.free // 1024} KiB and {state.free_inodes} inodes are left for {state.path}"
    hint = f'see what takes it: du -xh "$(findmnt -n -o TARGET -T {state.path})" | sort -h | tail'
    judged = problem if full else warning
    yield judged(f"the disk is {'full' if full else 'nearly full'}", f"{left}; changes fail", hint=hint)


def check_store(facts: Facts) -> Iterator[CheckResult]:
    """Services that vipctl added."""
    state = facts.state
    if state.store_faults:
        store = f"{state.path}/state.db"
        cause = f"{'; '.join(state.store_faults)}; changes by vipctl are refused"
        title = "what vipctl added cannot be read"
        if not state.has_copy:
            yield problem(title, cause, hint="what the text names is to be mended, then vipctl reload")
            return
        keep = f"cp -p {store} {store}.broken"
        repair = [keep, f"truncate -c -s 0 {store}-journal", f"cp -p {store}.last-good {store}"]
        yield problem(title, cause, *repair, *(["vipctl reload"] if facts.daemon.status else []))


def _store_unread(facts: Facts) -> str:
    return facts.skipped_as_user() or facts.state_unread()


CHECKS = (
    Check("state-dir", GROUP, "the state directory can be written", check_directory, Facts.state_unread),
    Check("state-dir-space", GROUP, "there is room for the state", check_space, Facts.state_unread),
    Check("store", GROUP, "what vipctl added can be read", check_store, _store_unread),
)
