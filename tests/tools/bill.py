# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A bill of materials names the package that was built, and all that it requires to run."""

from __future__ import annotations

import json
import re
import sys
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).parents[2]


def missing(bill: dict) -> list[str]:
    """What `bill` should have and has not."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    name = config["metadata"]["name"]
    version = re.search(r'"(.+)"', (ROOT / "custom" / "_version.py").read_text())[1]
    parts = {part["name"]: part for part in bill["components"]}
    if parts.get(name, {}).get("version") != version:
        return [f"{name} {version}"]
    required = config["options"]["install_requires"].split("\n")
    wanted = {re.split("[<>=]", each)[0] for each in required if each}
    needs = {each["ref"]: each.get("dependsOn", []) for each in bill["dependencies"]}
    of_ours = {ref.partition("==")[0] for ref in needs.get(parts[name]["bom-ref"], [])}
    return sorted(f"{each}, which {name} requires" for each in wanted - of_ours)


def main(path: str) -> int:
    bill = json.loads(Path(path).read_text())
    found = missing(bill)
    if found:
        print(f"{path}: does not name {'; '.join(found)}")
        return 1
    print(
        f"{path}: {bill['bomFormat']} {bill['specVersion']}, {len(bill['components'])} components"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
