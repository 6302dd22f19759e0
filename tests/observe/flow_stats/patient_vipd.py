"""vipd that reads the counters of legacy rules before each change, however long that takes: on a busy machine
a reading lasts longer than it may delay a change. `python -m tests.observe.flow_stats.patient_vipd`."""

from __future__ import annotations

import math

from vipd.__main__ import main
from vipd.dataplane.iptables.counters import counter

if __name__ == "__main__":
    vars(counter)["LONGEST_READING_BEFORE_A_WRITE"] = math.inf
    main()
