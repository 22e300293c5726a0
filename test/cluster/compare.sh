#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# compare.sh A B compares the results of two runs of e2e.sh in the folders A and B. It
# prints the tests with different results, and the tests that failed in both runs. It exits
# with status 1 if a test passed in A, but not in B.
set -euo pipefail
export LC_ALL=C
results() { cut -f1,2 "$1/summary.tsv" | sort -t $'\t' -k1,1; }
join -t $'\t' -a1 -a2 -e missing -o 0,1.2,2.2 <(results "$1") <(results "$2") | awk -F'\t' -v a="$1" -v b="$2" '
	$2 != $3 { printf "%s: %s, %s: %s: %s\n", a, $2, b, $3, $1; differ++; worse += $2 == "passed"; next }
	{ count[$2]++ }
	$2 == "FAILED" { print "failed in both: " $1 }
	END { printf "%d differ, %d failed in both, %d passed in both, %d skipped in both\n", differ, count["FAILED"], count["passed"], count["skipped"]
		exit worse > 0 }'
