// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"syscall"

	"github.com/kpng-project/kpng/api"
)

// backend programs services into one nftables table. Each SyncState writes the whole
// table in one transaction. The type implements sink.StateSink and sink.Cleaner.
type backend struct {
	// table is the name of the nftables table, which is of family inet.
	table string
	// nodePorts are networks. Node ports are served at the node addresses in these networks.
	nodePorts []netip.Prefix
}

// SyncState replaces all rules of the table by rules for services.
func (b *backend) SyncState(ctx context.Context, node *api.Node, services []*api.View) error {
	return load(ctx, b.rules(node, services))
}

// Cleanup deletes the table.
func (b *backend) Cleanup(ctx context.Context) error {
	return load(ctx, fmt.Sprintf("add table inet %[1]s\ndelete table inet %[1]s\n", b.table))
}

// load runs a script of nft commands as one transaction: the kernel applies all of it or
// nothing. nft reads the script from a file. If nft read from a pipe and this process was
// killed while writing, nft would run an incomplete script.
func load(ctx context.Context, script string) error {
	file, err := os.CreateTemp("", "fullstate-*.nft")
	if err != nil {
		return fmt.Errorf("write nft script: %w", err)
	}
	defer os.Remove(file.Name())
	defer file.Close()
	if _, err := file.WriteString(script); err != nil {
		return fmt.Errorf("write nft script: %w", err)
	}
	// When this process is killed, nft is killed, too. So nft cannot overwrite the rules of
	// the next process.
	runtime.LockOSThread() // the kernel sends Pdeathsig when this thread ends
	defer runtime.UnlockOSThread()
	nft := exec.CommandContext(ctx, "nft", "-f", file.Name())
	nft.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if output, err := nft.CombinedOutput(); err != nil {
		return fmt.Errorf("run nft: %w: %.500s", err, output)
	}
	return nil
}
