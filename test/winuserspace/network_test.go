// SPDX-License-Identifier: Apache-2.0

//go:build linux

package winuserspace

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
)

// The namespace has three interfaces: one for the node's addresses, one for pod
// addresses, and one for service addresses.
const nodeInterface, podInterface, serviceInterface = "node0", "pod0", "svc0"

// namespace is the network namespace that stands for the node.
type namespace struct{ *netnstest.Namespace }

func newNamespace(t *testing.T) namespace {
	t.Helper()
	n := namespace{netnstest.New(t)}
	for _, name := range []string{nodeInterface, podInterface, serviceInterface} {
		n.Stub(t, name)
	}
	return n
}

// pod simulates a pod with address ip. On port 8080 it accepts TCP connections and UDP
// datagrams. On each connection it first sends ip, and then sends back all bytes that it
// receives. It answers each datagram with ip.
func (n namespace) pod(t *testing.T, ip string) {
	t.Helper()
	n.Add(t, podInterface, ip)
	at := net.JoinHostPort(ip, "8080")
	netnstest.Listen(t, n.Do, at, func(c net.Conn) {
		fmt.Fprintln(c, ip)
		io.Copy(c, c)
	})
	netnstest.Answer(t, n.Do, at, ip)
}

// conn is a connection to a pod through a service.
type conn struct {
	net.Conn
	reader *bufio.Reader
	pod    string
}

// dial connects to a service and reads the address of the pod that accepts the
// connection. The argument from is the source address, or empty for the default.
func (n namespace) dial(from, to string) (*conn, error) {
	dialer := net.Dialer{Timeout: 5 * time.Second}
	if from != "" {
		dialer.LocalAddr = &net.TCPAddr{IP: net.ParseIP(from)}
	}
	var c net.Conn
	if err := n.Do(func() (err error) { c, err = dialer.Dial("tcp", to); return err }); err != nil {
		return nil, err
	}
	c.SetDeadline(time.Now().Add(30 * time.Second))
	r := bufio.NewReader(c)
	line, err := r.ReadString('\n')
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("read from %s: %w", to, err)
	}
	return &conn{c, r, strings.TrimSpace(line)}, nil
}

// echo sends a text and then closes the connection for writing. It returns an error if it
// does not receive exactly the same text.
func (c *conn) echo(text string) error {
	if _, err := io.WriteString(c, text); err != nil {
		return err
	}
	if err := c.Conn.(*net.TCPConn).CloseWrite(); err != nil {
		return err
	}
	got, err := io.ReadAll(c.reader)
	if err != nil {
		return err
	}
	if string(got) != text {
		return fmt.Errorf("received %d bytes of %d", len(got), len(text))
	}
	return nil
}

// ask connects and sends a text. It returns the address of the pod that echoes the text.
func (n namespace) ask(from, to string) (string, error) {
	c, err := n.dial(from, to)
	if err != nil {
		return "", err
	}
	defer c.Close()
	return c.pod, c.echo("hello")
}

// askUDP sends a datagram and returns the address of the pod that answers.
func (n namespace) askUDP(to string) (string, error) {
	var c net.Conn
	if err := n.Do(func() (err error) { c, err = net.Dial("udp", to); return err }); err != nil {
		return "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(time.Second))
	if _, err := io.WriteString(c, "who"); err != nil {
		return "", err
	}
	buffer := make([]byte, 100)
	got, err := c.Read(buffer)
	return string(buffer[:got]), err
}

// addresses returns the addresses of the interface for services.
func (n namespace) addresses(t *testing.T) []string {
	t.Helper()
	var links []struct {
		Addresses []struct {
			Family string `json:"family"`
			Local  string `json:"local"`
			Scope  string `json:"scope"`
		} `json:"addr_info"`
	}
	if err := json.Unmarshal([]byte(n.Run(t, "ip", "-json", "addr", "show", "dev", serviceInterface)), &links); err != nil {
		t.Fatal(err)
	}
	addresses := []string{}
	for _, link := range links {
		for _, a := range link.Addresses {
			if a.Scope == "global" {
				addresses = append(addresses, a.Local)
			}
		}
	}
	slices.Sort(addresses)
	return addresses
}

// netsh handles the requests of the program netsh. For a new address it reports success
// immediately, and adds the address 50 ms later.
type netsh struct {
	namespace namespace

	mu      sync.Mutex
	added   map[string]int
	deleted map[string]int
	refused string // the address that netsh refuses to add, if any
	odd     []string
}

func serveNetsh(t *testing.T, n namespace) *netsh {
	t.Helper()
	s := &netsh{namespace: n, added: map[string]int{}, deleted: map[string]int{}}
	netnstest.Listen(t, n.Do, "127.0.0.1:5555", func(c net.Conn) {
		var args []string
		if err := json.NewDecoder(c).Decode(&args); err != nil {
			return
		}
		text, status := "OK.", 0
		if err := s.do(args); err != nil {
			text, status = "Falscher Parameter: "+err.Error(), 1
		}
		json.NewEncoder(c).Encode(map[string]any{"Text": text, "Status": status})
	})
	t.Cleanup(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, call := range s.odd {
			t.Errorf("netsh was called with arguments that Windows rejects: %s", call)
		}
	})
	return s
}

func (s *netsh) do(args []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	text := strings.Join(args, " ")
	for _, family := range []struct{ add, delete, bits string }{
		{"interface ipv4 add address name=" + serviceInterface + " address=%s mask=255.255.255.255 store=active skipassource=true",
			"interface ipv4 delete address name=" + serviceInterface + " address=%s store=active", "/32"},
		{"interface ipv6 add address interface=" + serviceInterface + " address=%s/128 store=active skipassource=true",
			"interface ipv6 delete address interface=" + serviceInterface + " address=%s store=active", "/128"},
	} {
		if ip, ok := matches(text, family.add); ok {
			if ip == s.refused {
				return errors.New("refused")
			}
			s.added[ip]++
			time.AfterFunc(50*time.Millisecond, func() { s.change("add", ip+family.bits) })
			return nil
		}
		if ip, ok := matches(text, family.delete); ok {
			s.deleted[ip]++
			return s.change("del", ip+family.bits)
		}
	}
	s.odd = append(s.odd, text)
	return errors.New("unknown")
}

func (s *netsh) change(what, prefix string) error {
	return s.namespace.Do(exec.Command("ip", "addr", what, prefix, "dev", serviceInterface).Run)
}

// matches reports whether text equals pattern, in which %s stands for an IP address. It
// also returns the IP address.
func matches(text, pattern string) (string, bool) {
	before, after, _ := strings.Cut(pattern, "%s")
	ip, ok := strings.CutPrefix(text, before)
	if ok {
		ip, ok = strings.CutSuffix(ip, after)
	}
	if _, err := netip.ParseAddr(ip); err != nil {
		return "", false
	}
	return ip, ok
}

// times returns how often netsh added and deleted an address.
func (s *netsh) times(ip string) (added, deleted int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.added[ip], s.deleted[ip]
}

func (s *netsh) refuse(ip string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refused = ip
}
