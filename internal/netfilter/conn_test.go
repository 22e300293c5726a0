// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfilter

import (
	"testing"

	"github.com/kpng-project/kpng/internal/netnstest"
	"golang.org/x/sys/unix"
)

// TestAFailedReadDoesNotBlockTheNextDump lets a read fail in the middle of a dump. A
// socket cannot start a dump while another dump of the same socket is unfinished.
func TestAFailedReadDoesNotBlockTheNextDump(t *testing.T) {
	c := NewConn(netnstest.New(t).FD)
	defer c.Close()
	tables := 0
	dump := func() error {
		tables = 0
		return c.Query(t.Context(), func(b *Builder) {
			b.End(b.Begin(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETTABLE, unix.NLM_F_DUMP, unix.NFPROTO_INET))
		}, func([]byte) { tables++ })
	}
	const want = 5000
	err := c.Transact(t.Context(), func(b *Builder) {
		for i := range want {
			at := b.Begin(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, unix.NFPROTO_INET)
			b.String(unix.NFTA_TABLE_NAME, string([]byte{'t', byte('a' + i/676), byte('a' + i/26%26), byte('a' + i%26)}))
			b.End(at)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	buf := c.buf
	c.buf = buf[:100] // the kernel truncates the messages
	if err := dump(); err == nil {
		t.Fatal("a dump with truncated messages succeeds")
	}
	c.buf = buf
	if err := dump(); err != nil || tables != want {
		t.Errorf("the next dump returns %d tables, want %d, and the error %v", tables, want, err)
	}
}
