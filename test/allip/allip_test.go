// SPDX-License-Identifier: Apache-2.0

package allip

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/test/internal/apiserver"
)

var within = flag.Duration("within", time.Minute, "the maximum time until a change takes effect")

// subject is one of the two tested programs: all-ip, or kpng-callout with all-ip.sh.
type subject struct {
	name string
	// command returns the arguments and the environment with which to start the program.
	command func(t testing.TB) (args, env []string)
	// cleanup returns the command that removes the program's rules.
	cleanup func(t testing.TB) []string
	// own returns the program's rules, as nft or iptables-save prints them.
	own func(t testing.TB, node namespace) string
	// True if the program deletes connection-tracking entries of removed pods.
	forgets bool
}

const script = "../../examples/kpng-callout/all-ip.sh"

var subjects = []subject{
	{
		name:    "all-ip",
		command: func(t testing.TB) (args, env []string) { return []string{build(t, "all-ip")}, nil },
		cleanup: func(t testing.TB) []string { return []string{build(t, "all-ip"), "--cleanup"} },
		own: func(t testing.TB, node namespace) string {
			// With -a, nft prints handles, so a rewritten rule differs.
			return node.Run(t, "nft", "-a", "list", "table", "ip", "kpng-all-ip") +
				node.Run(t, "nft", "-a", "list", "table", "ip6", "kpng-all-ip")
		},
		forgets: true,
	},
	{
		name: "kpng-callout with all-ip.sh",
		command: func(t testing.TB) (args, env []string) {
			path, err := filepath.Abs(script)
			if err != nil {
				t.Fatal(err)
			}
			return []string{build(t, "kpng-callout"), "--all-ports"}, []string{"CALLOUT='" + path + "'"}
		},
		cleanup: func(testing.TB) []string { return []string{script, "cleanup"} },
		own: func(t testing.TB, node namespace) string {
			ours, _ := splitIPTables(t, node)
			return ours
		},
	},
}

// splitIPTables returns the rules of iptables and ip6tables in two parts: the rules of
// all-ip.sh, and all others.
func splitIPTables(t testing.TB, node namespace) (ours, others string) {
	t.Helper()
	for _, tool := range []string{"iptables-save", "ip6tables-save"} {
		for line := range strings.Lines(node.Run(t, tool)) {
			switch {
			case strings.HasPrefix(line, "#"): // skip the comment, which contains the time
			case strings.Contains(line, "KPNG-ALL-IP"):
				ours += line
			default:
				others += line
			}
		}
	}
	return ours, others
}

// foreign returns all rules that do not belong to the tested program.
func foreign(t testing.TB, node namespace) string {
	t.Helper()
	_, all := splitIPTables(t, node)
	for table := range strings.Lines(node.Run(t, "nft", "list", "tables")) {
		switch words := strings.Fields(table); strings.Join(words[1:], " ") {
		case "ip kpng-all-ip", "ip6 kpng-all-ip":
		case "ip nat", "ip filter", "ip6 nat", "ip6 filter": // tables of iptables
		default:
			all += node.Run(t, "nft", "-a", "-s", "list", "table", words[1], words[2])
		}
	}
	return all
}

// Rules of kube-proxy in nftables mode and in iptables mode. The tested program must not
// change them.
const (
	foreignTable = `
table ip kube-proxy {
	map service-ips {
		type ipv4_addr . inet_proto . inet_service : verdict
		elements = { 10.96.0.1 . tcp . 443 : goto service-A }
	}
	chain service-A {
		meta l4proto tcp dnat to 11.0.2.2:6443
	}
	chain services {
		ip daddr . meta l4proto . th dport vmap @service-ips
	}
	chain nat-prerouting {
		type nat hook prerouting priority dstnat;
		jump services
	}
	chain nat-output {
		type nat hook output priority -100;
		jump services
	}
}`
	foreignIPTables = `*nat
:KUBE-SERVICES - [0:0]
:KUBE-POSTROUTING - [0:0]
-A PREROUTING -j KUBE-SERVICES
-A OUTPUT -j KUBE-SERVICES
-A POSTROUTING -j KUBE-POSTROUTING
-A KUBE-POSTROUTING -m mark --mark 0x4000/0x4000 -j MASQUERADE
COMMIT
*filter
:KUBE-FORWARD - [0:0]
-A FORWARD -j KUBE-FORWARD
-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
COMMIT
`
)

func TestAllTrafficToExternalIPsGoesToALocalPod(t *testing.T) {
	need(t, "ip", "setpriv", "nft", "iptables", "ip6tables", "ping", "jq")
	for _, s := range subjects {
		t.Run(s.name, func(t *testing.T) {
			server := shared.Get(t)
			c := newCluster(t, server)
			n := newNetwork(t)
			api := strings.TrimPrefix(server.Config().Host, "https://")
			netnstest.Relay(t, n.node.Do, api, "tcp", api)
			n.node.RunWith(t, foreignTable, "nft", "-f", "-")
			n.node.RunWith(t, foreignIPTables, "iptables-restore", "--noflush")
			n.node.RunWith(t, foreignIPTables, "ip6tables-restore", "--noflush")
			others := foreign(t, n.node)
			kubeconfig := apiserver.Kubeconfig(t, server.Config())
			start := func() *process { return s.start(t, n.node, c.name, kubeconfig) }

			p := start()
			soon := func(what string, f func() error) {
				t.Helper()
				eventually(t, what, f)
				if now := foreign(t, n.node); now != others {
					t.Fatalf("%s: rules of other programs changed:\n%s", what, cmp.Diff(others, now))
				}
			}
			p.ready(t)
			soon("before there is a service", n.leadsTo("beyond"))

			c.create("example", c.name)
			c.lead("example", "pod1", "pod2@elsewhere")
			soon("a service is created", n.leadsTo("pod1"))
			soon("a pod reaches itself", func() error { return n.mustReach(n.pods["pod1"], "pod1", "tcp", tcpPorts[0]) })
			soon("the node's own traffic", func() error { return n.mustReach(n.node, "pod1", "tcp", tcpPorts[0]) })

			flow, err := n.client.dial("udp", externalIPs[0], udpPort)
			if err != nil {
				t.Fatal(err)
			}
			defer flow.Close()
			if got, err := askOn(flow); got != "pod1" || err != nil {
				t.Errorf("UDP client reaches %q, error %v", got, err)
			}
			c.lead("example", "pod1@elsewhere", "pod2")
			soon("the pod moves", n.leadsTo("pod2"))
			if got, err := askOn(flow); s.forgets && (got != "pod2" || err != nil) {
				t.Errorf("after the move the UDP client reaches %q, error %v", got, err)
			}

			c.lead("example", "pod1@elsewhere")
			soon("all pods are on other nodes", n.fails(isTimeout))
			c.lead("example", "pod1!@elsewhere")
			soon("no pod is ready", n.fails(isRefused))
			c.lead("example", "pod1", "pod2")
			soon("there are two pods", n.answers)

			c.lead("example", "pod1")
			c.create("rival", c.name)
			c.lead("rival", "pod2")
			soon("a younger service claims the addresses", n.leadsTo("pod1"))
			c.label("example", "somebody-else")
			soon("the service gets another label", n.leadsTo("pod2"))
			c.label("example", c.name)
			soon("the service gets its label back", n.leadsTo("pod1"))
			c.remove("example")
			soon("the older service is deleted", n.leadsTo("pod2"))

			before := s.own(t, n.node)
			n.uninterrupted(t, func() {
				p.end(t, syscall.SIGKILL)
				p = start()
				p.ready(t)
				// Check that the program works again.
				c.lead("rival", "pod1")
				eventually(t, "the pod moves", n.leadsTo("pod1"))
				c.lead("rival", "pod2")
				eventually(t, "the pod moves back", n.leadsTo("pod2"))
			})
			if s.forgets {
				p.end(t, syscall.SIGKILL)
				before = s.own(t, n.node)
				p = start()
				p.ready(t)
			}
			if diff := cmp.Diff(before, s.own(t, n.node)); diff != "" {
				t.Errorf("rules after a restart (-before +after):\n%s", diff)
			}

			c.remove("rival")
			soon("the last service is deleted", n.leadsTo("beyond"))
			p.end(t, syscall.SIGTERM)
			n.node.Run(t, s.cleanup(t)...)
			if now := foreign(t, n.node); now != others {
				t.Errorf("after cleanup, rules of other programs changed:\n%s", cmp.Diff(others, now))
			}
			if all := n.node.Run(t, "nft", "list", "ruleset"); strings.Contains(strings.ToLower(all), "kpng") {
				t.Errorf("after cleanup, these rules remain:\n%s", all)
			}
		})
	}
}

// eventually waits until f returns nil. If that takes longer than the flag -within
// allows, the test fails.
func eventually(t testing.TB, what string, f func() error) {
	t.Helper()
	start := time.Now()
	for {
		began := time.Now()
		err := f()
		if err == nil {
			// The logged time excludes the last call of f, which may take long.
			t.Logf("%s: effective after at most %s", what, began.Sub(start).Round(time.Millisecond))
			return
		}
		if began.Sub(start) > *within {
			t.Fatalf("%s: not effective after %s: %v", what, began.Sub(start), err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// mustReach returns an error if the client does not reach the named pod at both external
// IPs.
func (n *network) mustReach(client namespace, name, protocol string, port int) error {
	for _, ip := range externalIPs {
		if got, err := client.ask(protocol, ip, port); got != name || err != nil {
			return fmt.Errorf("%s, %s port %d leads to %q, error %w", ip, protocol, port, got, err)
		}
	}
	return nil
}

// leadsTo returns a function that checks whether all traffic from outside reaches the
// named pod.
func (n *network) leadsTo(name string) func() error {
	return func() error {
		errs := []error{n.mustReach(n.client, name, "udp", udpPort)}
		for _, port := range tcpPorts {
			errs = append(errs, n.mustReach(n.client, name, "tcp", port))
		}
		for _, ip := range externalIPs {
			errs = append(errs, n.echo(ip, name))
		}
		return errors.Join(errs...)
	}
}

// echo checks that an echo request from outside reaches the named pod and is answered.
func (n *network) echo(ip netip.Addr, name string) error {
	at, ok := n.pods[name]
	if !ok {
		at = n.upstream
	}
	before, err := at.echoRequests(ip)
	if err != nil {
		return err
	}
	if err := n.client.ping(ip); err != nil {
		return err
	}
	after, err := at.echoRequests(ip)
	if err == nil && after == before {
		return fmt.Errorf("an echo request to %s does not reach %q", ip, name)
	}
	return err
}

// answers checks that some pod answers at each external IP.
func (n *network) answers() error {
	for _, ip := range externalIPs {
		if _, err := n.client.ask("tcp", ip, tcpPorts[0]); err != nil {
			return err
		}
	}
	return nil
}

// fails returns a function. It checks that all connections from outside fail, and that
// isExpected accepts the errors.
func (n *network) fails(isExpected func(error) bool) func() error {
	return func() error {
		for _, ip := range externalIPs {
			for _, port := range tcpPorts {
				if got, err := n.client.ask("tcp", ip, port); err == nil || !isExpected(err) {
					return fmt.Errorf("%s, port %d leads to %q, error %v", ip, port, got, err)
				}
			}
			if got, err := n.client.ask("udp", ip, udpPort); err == nil || !isExpected(err) {
				return fmt.Errorf("%s, UDP leads to %q, error %v", ip, got, err)
			}
			if n.client.ping(ip) == nil {
				return fmt.Errorf("%s answers", ip)
			}
		}
		return nil
	}
}

func isTimeout(err error) bool {
	timeout, ok := errors.AsType[net.Error](err)
	return ok && timeout.Timeout()
}

func isRefused(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }

// uninterrupted calls f. It checks that an open connection stays open and all
// new connections succeed while f runs.
func (n *network) uninterrupted(t testing.TB, f func()) {
	t.Helper()
	streams := make([]net.Conn, len(externalIPs))
	for i, ip := range externalIPs {
		c, err := n.client.dial("tcp", ip, tcpPorts[0])
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		streams[i] = c
		if _, err := io.ReadFull(c, make([]byte, len("pod1\n"))); err != nil {
			t.Fatal(err)
		}
	}
	stop := make(chan struct{})
	var clients sync.WaitGroup
	for i, ip := range externalIPs {
		clients.Go(func() {
			for asked := 0; ; asked++ {
				select {
				case <-stop:
					t.Logf("%s: %d connections, and one that stayed open", ip, asked)
					return
				case <-time.After(5 * time.Millisecond):
				}
				streams[i].SetDeadline(time.Now().Add(time.Minute))
				word := make([]byte, 4)
				if _, err := streams[i].Write([]byte("echo")); err != nil {
					t.Errorf("%s: open connection: %v", ip, err)
					return
				}
				if _, err := io.ReadFull(streams[i], word); err != nil || !bytes.Equal(word, []byte("echo")) {
					t.Errorf("%s: open connection: %q, %v", ip, word, err)
					return
				}
				if _, err := n.client.ask("tcp", ip, tcpPorts[1]); err != nil {
					t.Errorf("%s: new connection: %v", ip, err)
					return
				}
			}
		})
	}
	f()
	close(stop)
	clients.Wait()
}

// process is a running program.
type process struct {
	cmd    *exec.Cmd
	health string
	node   namespace
	ended  bool
}

func (s *subject) start(t testing.TB, node namespace, proxy, kubeconfig string, flags ...string) *process {
	t.Helper()
	const health = "127.0.0.1:10266" // kube-proxy uses 10256
	args, env := s.command(t)
	// Start the program with the only capability that its manifest grants.
	args = append(args, "--kubeconfig", kubeconfig, "--service-proxy-name", proxy, "--node-name", proxy, "--healthz-bind-address", health)
	args = append(args, flags...)
	cmd := exec.Command("setpriv", append([]string{"--bounding-set=-all,+net_admin", "--inh-caps=-all,+net_admin", "--no-new-privs"}, args...)...)
	var log bytes.Buffer
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := node.Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	p := &process{cmd: cmd, health: health, node: node}
	t.Cleanup(func() {
		if !p.ended {
			p.end(t, syscall.SIGKILL)
		}
		if t.Failed() {
			t.Logf("%s logged:\n%s", s.name, &log)
		}
	})
	return p
}

// ready waits until the process has completed its first sync.
func (p *process) ready(t testing.TB) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		if p.get("/readyz") {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("the program does not become ready")
		}
	}
}

// get reports whether the health server of the process returns 200 for a path.
func (p *process) get(path string) bool {
	var c net.Conn
	if err := p.node.Do(func() (err error) { c, err = net.Dial("tcp", p.health); return err }); err != nil {
		return false
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(time.Second))
	fmt.Fprintf(c, "GET %s HTTP/1.0\r\n\r\n", path)
	answer, _ := io.ReadAll(c)
	return bytes.HasPrefix(answer, []byte("HTTP/1.0 200"))
}

// end sends a signal to the process and waits until it has ended.
func (p *process) end(t testing.TB, signal syscall.Signal) {
	t.Helper()
	p.ended = true
	if err := p.cmd.Process.Signal(signal); err != nil {
		t.Error(err)
	}
	if err := p.cmd.Wait(); err != nil && signal != syscall.SIGKILL {
		t.Errorf("the program returned %v", err)
	}
}
