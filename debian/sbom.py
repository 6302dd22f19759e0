#!/usr/bin/env python3
"""Writes a software bill of materials (CycloneDX 1.5, JSON) of what debian/requirements*.txt pin.

    python3 debian/sbom.py OUT REQUIREMENTS...

Every build refuses a file whose hash is not pinned, so the pins are what is bundled. The same pins give the
same bytes: there is no time and no random number in it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def components(requirements: list[Path]) -> list[dict[str, object]]:
    """One for each package, with the hashes of its wheels (of each Python and machine), or of its source."""
    found: dict[tuple[str, str], set[str]] = {}
    for file in requirements:
        for name, version, hashes in re.findall(r"(?m)^([\w.-]+)==(\S+)((?:.|\n\s)*)", file.read_text()):
            found.setdefault((name, version), set()).update(re.findall(r"sha256:([0-9a-f]{64})", hashes))
    return [
        {
            "type": "library",
            "bom-ref": f"pkg:pypi/{name}@{version}",
            "name": name,
            "version": version,
            "purl": f"pkg:pypi/{name}@{version}",
            "hashes": [{"alg": "SHA-256", "content": one} for one in sorted(hashes)],
        }
        for (name, version), hashes in sorted(found.items())
    ]


def bill(version: str, parts: list[dict[str, object]]) -> dict[str, object]:
    """The document."""
    vipd = {"type": "application", "bom-ref": f"vipd@{version}", "name": "vipd", "version": version}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {**vipd, "licenses": [{"license": {"id": "Apache-2.0"}}]}},
        "components": parts,
        "dependencies": [{"ref": vipd["bom-ref"], "dependsOn": [part["bom-ref"] for part in parts]}],
    }


def main() -> None:
    """Write what the command line asks for."""
    out, *requirements = map(Path, sys.argv[1:])
    source = (HERE.parent / "vipd/__init__.py").read_text()
    (version,) = re.findall(r'(?m)^__version__ = "([^"]+)"', source)
    out.write_text(json.dumps(bill(version, components(requirements)), indent=1) + "\n")


if __name__ == "__main__":
    main()
