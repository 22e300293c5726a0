// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
)

// TestSourceRangesApplyWithoutKernelFilter uses more source ranges than fit into a socket
// filter.
func TestSourceRangesApplyWithoutKernelFilter(t *testing.T) {
	n := netnstest.New(t)
	if err := n.Do(func() error {
		_, err := os.Stat("/proc/sys/net/core/optmem_max")
		return err
	}); err != nil {
		t.Skip("before Linux 6.8 the limit is global to the machine:", err)
	}
	server := namedServer(t, "a") // outside of the namespace n; the backend's goroutines that connect to the server are outside, too
	runInside(t, n, func(b *backend) {
		admit := func(ranges ...netip.Prefix) {
			t.Helper()
			view := serviceAt("web", "10.96.0.1", 80, api.TCP).addEndpoints(server).modify(func(s *api.Service) {
				s.IPs.ExternalIPs = api.NewIPSet(netip.MustParseAddr("192.0.2.1"))
				s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.ExternalIPs, Prefixes: ranges}}
			}).view()
			if err := b.Sync(t.Context(), fullOf(view)); err != nil {
				t.Error(err)
			}
		}
		ask := func(from string) (string, error) {
			d := net.Dialer{Timeout: patience, LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
			c, err := d.Dial("tcp", "192.0.2.1:80")
			if err != nil {
				return "", err
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(patience))
			fmt.Fprintln(c, "hello")
			return bufio.NewReader(c).ReadString('\n')
		}
		admit(netip.MustParsePrefix("127.1.0.0/16"))
		n.Set(t, "core/optmem_max=512")
		var ranges []netip.Prefix
		for i := range 100 {
			ranges = append(ranges, netip.PrefixFrom(netip.AddrFrom4([4]byte{127, 2, 0, byte(i)}), 32))
		}
		admit(ranges...)
		if got, err := ask("127.2.0.99"); got != "a hello\n" {
			t.Errorf("an admitted client got %q, error %v", got, err)
		}
		if got, err := ask("127.1.0.1"); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("a client that is no longer admitted got %q, error %v, want a reset", got, err)
		}
	})
}

// TestSourceRangesApplyToLinkLocalClients uses a client whose address has a zone.
func TestSourceRangesApplyToLinkLocalClients(t *testing.T) {
	n := netnstest.New(t)
	n.Add(t, "lo", "fe80::1/64")
	server := namedServerAt(t, "a", "[::1]:0")
	runInside(t, n, func(b *backend) {
		eventually(t, "sockets can use the address", func() bool {
			l, err := net.Listen("tcp", "[fe80::1%lo]:0")
			if err == nil {
				l.Close()
			}
			return err == nil
		})
		for ranges, want := range map[string]bool{"fe80::/10": true, "fe80::2/128": false} {
			if err := b.Sync(t.Context(), fullOf(serviceAt("web", "fd00::1", 80, api.TCP).addEndpoints(server).modify(func(s *api.Service) {
				s.IPs.ExternalIPs = api.NewIPSet(netip.MustParseAddr("fd00::2"))
				s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.ExternalIPs, Prefixes: []netip.Prefix{netip.MustParsePrefix(ranges)}}}
			}).view())); err != nil {
				t.Error(err)
			}
			timeout := 500 * time.Millisecond
			if want {
				timeout = 30 * time.Second // long, because TCP repeats a lost packet only after 1 s
			}
			d := net.Dialer{Timeout: timeout, LocalAddr: &net.TCPAddr{IP: net.ParseIP("fe80::1"), Zone: "lo"}}
			c, err := d.Dial("tcp", "[fd00::2]:80")
			if err == nil {
				fmt.Fprintln(c, "hello")
				_, err = bufio.NewReader(c).ReadString('\n')
				c.Close()
			}
			if admitted := err == nil; admitted != want {
				t.Errorf("with the source range %s, a client at fe80::1%%lo is admitted: %v, want %v (%v)", ranges, admitted, want, err)
			}
		}
	})
}
