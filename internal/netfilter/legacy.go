// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfilter

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/kpng-project/kpng/api"
)

// LegacyTables returns the tables of iptables-legacy that the kernel has loaded in the
// network namespace of the calling thread. If a program reads a table that is not loaded,
// the kernel loads it. The base chains of this table have no rules.
func LegacyTables(family api.Family) ([]string, error) {
	file := "/proc/thread-self/net/ip_tables_names"
	if family == api.IPv6 {
		file = "/proc/thread-self/net/ip6_tables_names"
	}
	names, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list tables of iptables-legacy: %w", err)
	}
	return strings.Fields(string(names)), nil
}
