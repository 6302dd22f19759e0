"""vipd that writes every change by programs, so that programs which refuse or fail show: `python -m
tests.faults.tools_only_vipd`."""

from __future__ import annotations

from vipd.__main__ import main
from vipd.dataplane.nftables import writer

if __name__ == "__main__":
    vars(writer)["_transact"] = lambda *_: False
    main()
