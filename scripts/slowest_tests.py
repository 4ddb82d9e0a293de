"""Prints the ten slowest tests of all JUnit files in a folder, and the sum as ``N passed, N failed, N skipped``.

Exit code 1 when a test failed or none passed.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def main(folder: Path) -> int:
    cases = [case for path in sorted(folder.glob("*.xml")) for case in ElementTree.parse(path).iter("testcase")]
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    print("== the ten slowest")
    for case in sorted(cases, key=_seconds, reverse=True)[:10]:
        print(f"{_seconds(case):8.2f} s  {case.get('classname', '')}::{case.get('name', '')}")
    passed = len(cases) - len(failed) - len(skipped)
    print(f"{passed} passed, {len(failed)} failed, {len(skipped)} skipped")
    return 1 if failed or not passed else 0


def _seconds(case: ElementTree.Element) -> float:
    return float(case.get("time", "0"))


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
