// SPDX-License-Identifier: Apache-2.0

package metrics_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/metrics"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

func TestWhatPartsOfBackendsDoIsCounted(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	connections, checks, nft := metrics.NewConnections(), metrics.NewHealthChecks(), metrics.NewNFTables()
	registry.MustRegister(connections, checks, nft)
	connections.Looked(5, 3, time.Millisecond, nil)
	connections.Looked(1, 0, time.Millisecond, errors.New("no permission"))
	checks.Ports(1, 2)
	checks.Ports(4, 1)
	checks.Fault()
	nft.Holds(9)
	nft.Holds(7)
	nft.Transacted(nil)
	nft.Transacted(errors.New("the map is full"))
	nft.Transacted(nil)
	nft.Drifted()
	nft.Drifted()
	nft.Mended()
	const want = `
# HELP kpng_conntrack_entries_ended_total Stale connections that were ended.
# TYPE kpng_conntrack_entries_ended_total counter
kpng_conntrack_entries_ended_total 3
# HELP kpng_conntrack_entries_seen_total Connections that the kernel told of as stale connections were looked for.
# TYPE kpng_conntrack_entries_seen_total counter
kpng_conntrack_entries_seen_total 6
# HELP kpng_conntrack_errors_total Looks for stale connections that failed and are made again.
# TYPE kpng_conntrack_errors_total counter
kpng_conntrack_errors_total 1
# HELP kpng_healthcheck_faults_total Times that a health-check node port could not be listened on, for a new reason.
# TYPE kpng_healthcheck_faults_total counter
kpng_healthcheck_faults_total 1
# HELP kpng_healthcheck_ports_failing Health-check node ports that cannot be listened on, once for each node address.
# TYPE kpng_healthcheck_ports_failing gauge
kpng_healthcheck_ports_failing 1
# HELP kpng_healthcheck_ports_open Health-check node ports that are listened on, once for each node address.
# TYPE kpng_healthcheck_ports_open gauge
kpng_healthcheck_ports_open 4
# HELP kpng_nftables_drift_found_total Times that the table was not as it was left, as somebody else had changed it.
# TYPE kpng_nftables_drift_found_total counter
kpng_nftables_drift_found_total 2
# HELP kpng_nftables_drift_mended_total Times that the table was made again what it should be, after somebody else had changed it.
# TYPE kpng_nftables_drift_mended_total counter
kpng_nftables_drift_mended_total 1
# HELP kpng_nftables_elements Elements of the maps and sets of the table.
# TYPE kpng_nftables_elements gauge
kpng_nftables_elements 7
# HELP kpng_nftables_transaction_errors_total Attempts to change the table that failed, and so changed nothing, or had no answer.
# TYPE kpng_nftables_transaction_errors_total counter
kpng_nftables_transaction_errors_total 1
# HELP kpng_nftables_transactions_total Attempts to change the table in a transaction.
# TYPE kpng_nftables_transactions_total counter
kpng_nftables_transactions_total 3
`
	if err := testutil.GatherAndCompare(registry, strings.NewReader(want),
		"kpng_conntrack_entries_ended_total", "kpng_conntrack_entries_seen_total", "kpng_conntrack_errors_total",
		"kpng_healthcheck_faults_total", "kpng_healthcheck_ports_failing", "kpng_healthcheck_ports_open",
		"kpng_nftables_drift_found_total", "kpng_nftables_drift_mended_total", "kpng_nftables_elements",
		"kpng_nftables_transaction_errors_total", "kpng_nftables_transactions_total"); err != nil {
		t.Error(err)
	}
	if problems, err := testutil.GatherAndLint(registry); err != nil || len(problems) > 0 {
		t.Errorf("problems %v, error %v", problems, err)
	}
}
