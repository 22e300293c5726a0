// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
)

// inNamespace is the name of an environment variable. If it is set, the test already runs
// in a network namespace of its own.
const inNamespace = "KPNG_IN_NAMESPACE"

// TestTheREADME runs the commands of README.md in a namespace, with or without root.
func TestTheREADME(t *testing.T) {
	netnstest.NeedRoot(t)
	if os.Getenv(inNamespace) == "" {
		args := []string{"--net", os.Args[0], "-test.run=^TestTheREADME$"}
		if os.Geteuid() != 0 {
			args = append([]string{"--map-root-user"}, args...)
		}
		test := exec.CommandContext(t.Context(), "unshare", args...)
		test.Env = append(os.Environ(), inNamespace+"=1")
		if out, err := test.CombinedOutput(); err != nil {
			t.Fatalf("test in a network namespace: %v\n%s", err, out)
		}
		return
	}
	run(t, "ip", "link", "set", "lo", "up")
	bin := t.TempDir()
	run(t, "go", "build", "-o", bin+"/", ".", "./pods")
	manifests := filepath.Join(bin, "demo.yaml")
	demo, err := os.ReadFile("demo.yaml")
	if err == nil {
		err = os.WriteFile(manifests, demo, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	start(t, filepath.Join(bin, "pods"), "10.244.0.2:8080", "10.244.0.3:8080", "[fd00:10:244::2]:8080")
	for _, pod := range []string{"10.244.0.2:8080", "10.244.0.3:8080", "[fd00:10:244::2]:8080"} {
		eventually(t, "the pod "+pod+" serves", func() error {
			_, err := get("http://" + pod)
			_, errUDP := askUDP(pod)
			return errors.Join(err, errUDP)
		})
	}
	proxy := start(t, filepath.Join(bin, "userspace"), "--manifests", manifests, "--node-name", "here", "-v=4")

	const podA, podB, podA6 = "pod 10.244.0.2:8080\n", "pod 10.244.0.3:8080\n", "pod [fd00:10:244::2]:8080\n"
	for _, c := range []struct {
		what, url string
		want      []string
	}{
		{"the cluster IP alternates between two pods, and skips the missing one", "http://10.96.0.80", []string{podA, podB}},
		{"IPv6 leads to its own pod", "http://[fd00:10:96::80]", []string{podA6}},
		{"the external IP leads to the two pods", "http://192.0.2.80", []string{podA, podB}},
	} {
		var got []string
		eventually(t, c.what, func() error { // the proxy may still be adding the service
			pod, err := get(c.url)
			if err != nil {
				return err
			}
			if got = append(got, pod); len(got) < 6 {
				return errors.New("more answers are needed")
			}
			return nil
		})
		slices.Sort(got)
		if got = slices.Compact(got); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q answer, want %q", c.what, got, c.want)
		}
	}
	var pods []string
	eventually(t, "UDP is answered", func() error {
		pod, err := askUDP("10.96.0.10:53")
		if err != nil {
			return err
		}
		if pods = append(pods, pod); len(pods) < 4 {
			return errors.New("more answers are needed")
		}
		return nil
	})
	if len(slices.Compact(pods)) != 1 {
		t.Errorf("datagrams of one client reach %q despite affinity", pods)
	}
	const routes = "ip route show table local proto 107; ip -6 route show table local proto 107"
	if out := run(t, "sh", "-c", routes); !strings.Contains(out, "local 10.96.0.80 ") || !strings.Contains(out, "local fd00:10:96::80 ") {
		t.Errorf("local routes:\n%s", out)
	}

	// Delete the Service web, which is the first object in the file.
	_, rest, _ := strings.Cut(string(demo), "\n---\n")
	if err := errors.Join(os.WriteFile(manifests+".new", []byte(rest), 0o600), os.Rename(manifests+".new", manifests)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a deleted service is no longer served", func() error {
		if pod, err := get("http://10.96.0.80"); err == nil {
			return fmt.Errorf("%q answers", pod)
		}
		return nil
	})
	if err := proxy.end(); err != nil {
		t.Errorf("the proxy returned %v", err)
	}
	if out := run(t, "sh", "-c", routes); out != "" {
		t.Errorf("local routes after the end:\n%s", out)
	}
	expectLog(t, proxy.log.String())
}

// expectLog expects log lines with the messages and keys of kube-proxy's userspace mode
// on Windows.
func expectLog(t *testing.T, log string) {
	t.Helper()
	const sink, web = ` sink="userspace" `, `"default/web:http"`
	const at, pod = `"?10\.96\.0\.80:80"?`, `"?10\.244\.0\.[23]:8080"?`
	const client, own = `"?[0-9.]+:\d+"?`, `"?[0-9.]+:\d+"?`
	for _, pattern := range []string{
		`"Adding new service"` + sink + `servicePortName=` + web + ` protocol="TCP" portNum=80`,
		`"Proxying for service"` + sink + `servicePortName=` + web + ` protocol="TCP" address=` + at,
		`"Accepted TCP connection from remote"` + sink + `remoteAddress=` + client + ` localAddress=` + at,
		`"NextEndpoint for service"` + sink + `servicePortName=` + web + ` address=` + client + ` endpoints=\["?10\.244\.0\.2:8080"?,"?10\.244\.0\.3:8080"?,"?10\.244\.0\.4:8080"?\]`,
		`"Mapped service to endpoint"` + sink + `service=` + web + ` endpoint=` + pod,
		`"Creating proxy between remote and local addresses"` + sink + `inRemoteAddress=` + client + ` inLocalAddress=` + at + ` outLocalAddress=` + own + ` outRemoteAddress=` + pod,
		`"Copying remote address bytes"` + sink + `direction="to backend" sourceRemoteAddress=` + client + ` destinationRemoteAddress=` + pod,
		`"Copying remote address bytes"` + sink + `direction="from backend" sourceRemoteAddress=` + pod + ` destinationRemoteAddress=` + client,
		`"Copied remote address bytes"` + sink + `bytes=\d+ direction="to backend" sourceRemoteAddress=` + client + ` destinationRemoteAddress=` + pod,
		`"Copied remote address bytes"` + sink + `bytes=\d+ direction="from backend" sourceRemoteAddress=` + pod + ` destinationRemoteAddress=` + client,
		`"Stopping service"` + sink + `service="default/web"`,
	} {
		if !regexp.MustCompile(pattern).MatchString(log) {
			t.Errorf("the log has no line like\n%s", pattern)
		}
	}
}

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// process is a running program.
type process struct {
	log buffer
	// The first call stops the program. Every call returns the program's error.
	end func() error
}

func start(t *testing.T, name string, args ...string) *process {
	t.Helper()
	p := &process{}
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr = &p.log, &p.log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p.end = sync.OnceValue(func() error {
		return errors.Join(cmd.Process.Signal(syscall.SIGTERM), cmd.Wait())
	})
	t.Cleanup(func() {
		p.end()
		if t.Failed() {
			t.Logf("%s logged\n%s", filepath.Base(name), p.log.String())
		}
	})
	return p
}

// buffer is a bytes.Buffer that is safe for concurrent use.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// eventually calls try until try returns nil. The time limit is long enough
// for a busy machine.
func eventually(t *testing.T, what string, try func() error) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		err := try()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("not within a minute: %s: %v", what, err)
		}
	}
}

// get sends an HTTP request on a new connection.
func get(url string) (string, error) {
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}
	answer, err := client.Get(url)
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	return string(body), err
}

// askUDP sends one datagram from a new port.
func askUDP(to string) (string, error) {
	c, err := net.Dial("udp", to)
	if err != nil {
		return "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(time.Second))
	if _, err := io.WriteString(c, "hi"); err != nil {
		return "", err
	}
	answer := make([]byte, 100)
	n, err := c.Read(answer)
	return string(answer[:n]), err
}
