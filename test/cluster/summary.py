#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""summary.py JUNIT prints a line for each test that the filters selected: name, result, seconds, reason."""
import re
import sys
import xml.etree.ElementTree

rows = []
for case in xml.etree.ElementTree.parse(sys.argv[1]).iter("testcase"):
    name, seconds = case.get("name"), "%.0f" % float(case.get("time") or 0)
    failure = case.find("failure")
    if failure is None:
        failure = case.find("error")
    skipped = case.find("skipped")
    reason = ""
    if failure is not None:
        result, reason = "FAILED", failure.get("message") or failure.text or ""
    elif not name.startswith("[It]"):
        continue  # the set-up of the suite
    elif skipped is not None:
        result, reason = "skipped", skipped.get("message") or ""
        if reason in ("", "skipped"):
            continue  # not selected
    else:
        result = "passed"
    reason = re.sub(r" In \[\w+\] at: .*", "", " ".join(reason.split()))[:300]
    rows.append((name.removeprefix("[It] "), result, seconds, reason))
for row in sorted(rows):
    print("\t".join(row))
