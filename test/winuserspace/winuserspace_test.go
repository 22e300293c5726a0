// SPDX-License-Identifier: Apache-2.0

//go:build linux

package winuserspace

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/test/internal/wine"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
)

const (
	nodeName = "win-1"
	nodeIP   = "192.168.77.1"
	// foreign is an address that another program has added to the interface for services.
	foreign = "10.97.0.99"

	podA, podB, podC = "10.244.0.2", "10.244.0.3", "10.244.0.4"
	podA6            = "fd00:10:244::2"
)

func isIPv6(ip string) bool { return strings.Contains(ip, ":") }

func at(ip string, port int) string { return net.JoinHostPort(ip, strconv.Itoa(port)) }

// world consists of a cluster, a node, and the program under test.
type world struct {
	t     *testing.T
	node  namespace
	netsh *netsh
	*cluster
	wine    *wine.Wine
	program string
	// expected contains the addresses that the interface should have.
	expected sets.Set[string]
}

func newWorld(t *testing.T) *world {
	t.Helper()
	node := newNamespace(t)
	for _, ip := range []string{nodeIP, "192.168.77.2"} {
		node.Add(t, nodeInterface, ip+"/24")
	}
	node.Add(t, serviceInterface, foreign+"/32")
	for _, ip := range []string{podA, podB, podC, podA6} {
		node.pod(t, ip)
	}
	w := &world{t: t, node: node, netsh: serveNetsh(t, node), expected: sets.New[string]()}
	w.cluster = newCluster(t)
	w.cluster.node(nodeName, nodeIP)
	netnstest.Relay(t, node.Do, "127.0.0.1:12090", "unix", w.socket)
	w.wine = wine.New(t, wine.Options{Namespace: node.Namespace})
	w.wine.Install(t, w.wine.BuildFrom(t, ".", "./netsh"))
	w.wine.Run(t, "reg", "add", `HKCU\Software\Wine\DllOverrides`, "/v", "netsh.exe", "/d", "native")
	w.program = w.wine.Build(t, "./examples/winuserspace")
	return w
}

// args returns the arguments of the program under test, followed by the given further
// arguments.
func (w *world) args(more ...string) []string {
	// Set the path of the state file. By default the file is in %ProgramData%. Under Wine,
	// this folder differs between services and other programs.
	return append([]string{"-v=4", "--node-name=" + nodeName, "--drain-timeout=1s", `--state-file=C:\kpng\addresses`}, more...)
}

// create creates a service and adds its addresses to expected.
func (w *world) create(name string, spec corev1.ServiceSpec, pods ...string) *corev1.Service {
	w.t.Helper()
	s := w.service(name, spec, pods...)
	w.expected.Insert(s.Spec.ClusterIPs...)
	w.expected.Insert(s.Spec.ExternalIPs...)
	return s
}

// expectAddresses waits until the interface has exactly the addresses ips and the foreign
// address.
func (w *world) expectAddresses(when string, ips []string) {
	w.t.Helper()
	want := slices.Sorted(slices.Values(append(slices.Clone(ips), foreign)))
	eventually(w.t, "the addresses of services are on their interface "+when, func() error {
		if diff := cmp.Diff(want, w.node.addresses(w.t)); diff != "" {
			return errors.New("(-want +got)\n" + diff)
		}
		return nil
	})
}

// expectPods waits until all connections to an address succeed and reach exactly these
// pods.
func (w *world) expectPods(what, to string, pods ...string) {
	w.t.Helper()
	eventually(w.t, what, func() error {
		got := sets.New[string]()
		for range 2 * len(pods) {
			pod, err := w.node.ask("", to)
			if err != nil {
				return err
			}
			got.Insert(pod)
		}
		if !got.Equal(sets.New(pods...)) {
			return fmt.Errorf("%v answer at %s, want %v", sets.List(got), to, pods)
		}
		return nil
	})
}

func (w *world) expectRefused(what, to string) {
	w.t.Helper()
	eventually(w.t, what, func() error {
		if pod, err := w.node.ask("", to); err == nil {
			return fmt.Errorf("%s answers at %s", pod, to)
		}
		return nil
	})
}

func tcp(port int32) []corev1.ServicePort {
	return []corev1.ServicePort{{Name: "http", Port: port, Protocol: corev1.ProtocolTCP}}
}

func TestWinUserspaceProxiesUnderWine(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.netsh.refuse("192.0.2.66")
	web := w.create("web", corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, ExternalIPs: []string{"192.0.2.1"}, Ports: tcp(80)}, podA, podB)
	dns := w.create("dns", corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP}}}, podA)
	sticky := w.create("sticky", corev1.ServiceSpec{
		Ports: tcp(80), SessionAffinity: corev1.ServiceAffinityClientIP,
		SessionAffinityConfig: &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(int32(2))}},
	}, podA, podB)
	six := w.create("six", corev1.ServiceSpec{IPFamilies: []corev1.IPFamily{corev1.IPv6Protocol}, Ports: tcp(80)}, podA6)

	p := w.wine.StartEnv(t, []string{"INTERFACE_TO_ADD_SERVICE_IP=" + serviceInterface}, w.program, w.args()...)
	w.expectAddresses("after the start", sets.List(w.expected))

	clusterIP, nodePort := at(web.Spec.ClusterIP, 80), at(nodeIP, int(web.Spec.Ports[0].NodePort))
	w.expectPods("the cluster IP alternates between both pods", clusterIP, podA, podB)
	w.expectPods("the external IP alternates between both pods", at("192.0.2.1", 80), podA, podB)
	w.expectPods("the node port alternates between both pods", nodePort, podA, podB)
	w.expectPods("IPv6 alternates between its own pods", at(six.Spec.ClusterIP, 80), podA6)
	eventually(t, "UDP leads to the pod", func() error {
		pod, err := w.node.askUDP(at(dns.Spec.ClusterIP, 53))
		if err == nil && pod != podA {
			err = fmt.Errorf("%q answered", pod)
		}
		return err
	})
	w.affinity(at(sticky.Spec.ClusterIP, 80))
	w.parallel(clusterIP, 500)
	w.changeService(web, clusterIP)
	w.refusals()
	w.restartOfServer(clusterIP)

	expectLog(t, p.Log(t), w.cluster.namespace, web.Spec.ClusterIP)

	t.Log("killing the program")
	p.Kill(t)
	w.expectAddresses("after the program was killed", sets.List(w.expected))
	w.delete("six")
	w.expected.Delete(six.Spec.ClusterIP)
	w.asService(clusterIP)
	w.inOneProgram(clusterIP)
}

// affinity checks session affinity. A client that reconnects before the timeout must
// reach the same pod. After the timeout it must reach another pod.
func (w *world) affinity(to string) {
	w.t.Helper()
	const timeout = 2 * time.Second
	var pod string
	var last time.Time // the time just before the client's last connection
	for start := time.Now(); time.Since(start) < timeout+time.Second; time.Sleep(100 * time.Millisecond) {
		now := time.Now()
		before := pod
		var err error
		if pod, err = w.node.ask("192.168.77.2", to); err != nil {
			w.t.Fatal(err)
		}
		if before != "" && pod != before && time.Since(last) < timeout {
			w.t.Fatalf("within %v the client reached %s, and before %s", time.Since(last), pod, before)
		}
		last = now
	}
	// The pods take turns, and no other client connects, so it is the other pod's turn.
	eventually(w.t, "affinity expires", func() error {
		time.Sleep(timeout + timeout/4)
		again, err := w.node.ask("192.168.77.2", to)
		if err == nil && again == pod {
			err = fmt.Errorf("the client reached %s again", again)
		}
		return err
	})
}

// parallel opens many connections, and then exchanges a text over each connection.
func (w *world) parallel(to string, count int) {
	w.t.Helper()
	var (
		group errgroup.Group
		all   sync.WaitGroup
		text  = strings.Repeat("parallel ", 2000)
	)
	group.SetLimit(count)
	all.Add(count)
	for i := range count {
		group.Go(func() error {
			c, err := w.node.dial("", to)
			all.Done()
			if err != nil {
				return fmt.Errorf("connection %d: %w", i, err)
			}
			defer c.Close()
			all.Wait()
			return c.echo(text)
		})
	}
	if err := group.Wait(); err != nil {
		w.t.Errorf("%d concurrent connections: %v", count, err)
	}
}

// traffic connects repeatedly until stop is called. A call of stop returns the number of
// successful connections and the errors of the failed connections.
func (w *world) traffic(to string) (stop func() (int, error)) {
	ctx, cancel := context.WithCancel(w.t.Context())
	var (
		wg    sync.WaitGroup
		count int
		errs  []error
	)
	wg.Go(func() {
		for ; ctx.Err() == nil; time.Sleep(5 * time.Millisecond) {
			if _, err := w.node.ask("", to); err != nil {
				errs = append(errs, err)
			} else {
				count++
			}
		}
	})
	return func() (int, error) {
		cancel()
		wg.Wait()
		return count, errors.Join(errs...)
	}
}

// stopWithoutErrors calls the function stop. The test fails if a connection failed or if no
// connection was made.
func stopWithoutErrors(t *testing.T, while string, stop func() (int, error)) {
	t.Helper()
	if count, err := stop(); err != nil || count == 0 {
		t.Errorf("while %s: %d connections succeeded, errors: %v", while, count, err)
	}
}

// changeService replaces the pods of the service web, and then changes its frontends,
// while clients connect.
func (w *world) changeService(web *corev1.Service, clusterIP string) {
	w.t.Helper()
	stop := w.traffic(clusterIP)
	var old *conn
	eventually(w.t, "a connection to the first pod", func() (err error) {
		if old, err = w.node.dial("", clusterIP); err == nil && old.pod != podA {
			old.Close()
			err = errors.New("the connection reached the other pod")
		}
		return err
	})
	defer old.Close()
	w.pods("web", podB, podC)
	w.expectPods("new connections reach the new pods", clusterIP, podB, podC)
	stopWithoutErrors(w.t, "pods changed", stop)
	if err := old.echo("still here"); err != nil {
		w.t.Errorf("a connection to a removed pod: %v", err)
	}

	stop = w.traffic(clusterIP)
	added, deleted := w.netsh.times(web.Spec.ClusterIP)
	web.Spec.Ports = append(web.Spec.Ports, corev1.ServicePort{Name: "more", Port: 81, Protocol: corev1.ProtocolTCP})
	web = w.update(web)
	w.expectRefused("a port without endpoints is not served", at(web.Spec.ClusterIP, 81))
	web.Spec.Ports = web.Spec.Ports[:1]
	web.Spec.ExternalIPs = []string{"192.0.2.2"}
	w.update(web)
	w.expected.Delete("192.0.2.1")
	w.expected.Insert("192.0.2.2")
	w.expectAddresses("after a service has another external IP", sets.List(w.expected))
	w.expectPods("the new external IP is served", at("192.0.2.2", 80), podB, podC)
	stopWithoutErrors(w.t, "frontends were added and removed", stop)
	if a, d := w.netsh.times(web.Spec.ClusterIP); a != added || d != deleted {
		w.t.Errorf("the unchanged cluster IP was added %d and deleted %d times", a-added, d-deleted)
	}
}

// refusals lets netsh refuse an address for a while. Meanwhile, the program must add all
// other addresses.
func (w *world) refusals() {
	w.t.Helper()
	s := w.service("refused", corev1.ServiceSpec{ExternalIPs: []string{"192.0.2.66"}, Ports: tcp(80)}, podA)
	w.expectPods("the cluster IP is served while the external IP cannot be", at(s.Spec.ClusterIP, 80), podA)
	w.netsh.refuse("")
	w.expectPods("the external IP is served when netsh has added it", at("192.0.2.66", 80), podA)
	w.delete("refused")
	w.expectAddresses("after a service was deleted", sets.List(w.expected))
}

// restartOfServer kills kpng, creates a service and starts kpng again. During this time
// connections must succeed.
func (w *world) restartOfServer(clusterIP string) {
	w.t.Helper()
	stop := w.traffic(clusterIP)
	w.stop()
	late := w.create("late", corev1.ServiceSpec{Ports: tcp(80)}, podC)
	w.start()
	w.expectPods("a service created while kpng did not run is served", at(late.Spec.ClusterIP, 80), podC)
	stopWithoutErrors(w.t, "kpng did not run", stop)
	w.expectAddresses("after kpng restarted", sets.List(w.expected))
}

// asService runs the program as a Windows service.
func (w *world) asService(clusterIP string) {
	w.t.Helper()
	log := filepath.Join(w.wine.Drive(), "kpng", "winuserspace.log")
	line := strings.Join(append([]string{`"` + wine.Path(w.program) + `"`, "--windows-service", `--log-file=C:\kpng\winuserspace.log`, "--interface=" + serviceInterface}, w.args()...), " ")
	w.wine.Run(w.t, "sc", "create", "winuserspace", "binPath=", line)
	w.t.Cleanup(func() {
		if w.t.Failed() {
			text, err := os.ReadFile(log)
			w.t.Logf("the service logged (%v):\n%s", err, text)
		}
	})
	// Wine ends its services when no other program runs. To prevent this, run a program that
	// waits for a server that does not exist.
	w.wine.Start(w.t, w.program, "--api=tcp://127.0.0.1:1", `--state-file=C:\kpng\idle`, "--node-name="+nodeName)
	w.wine.Run(w.t, "sc", "start", "winuserspace")
	w.expectAddresses("after the service started and stale addresses were removed", sets.List(w.expected))
	w.expectPods("the service proxies", clusterIP, podB, podC)
	w.expectState("RUNNING", "4")
	w.wine.Run(w.t, "sc", "stop", "winuserspace")
	w.expectAddresses("after the service stopped", nil)
	w.expectState("STOPPED", "1")
	text, err := os.ReadFile(log)
	if err != nil {
		w.t.Fatal(err)
	}
	if !strings.Contains(string(text), `"NextEndpoint for service"`) {
		w.t.Errorf("log of the service:\n%s", text)
	}
}

// inOneProgram tests kpng.exe instead of winuserspace.exe, including the command cleanup.
func (w *world) inOneProgram(clusterIP string) {
	w.t.Helper()
	kpng := w.wine.Build(w.t, "./cmd/kpng")
	platform := []string{"--interface=" + serviceInterface, `--state-file=C:\kpng\addresses`}
	p := w.wine.Start(w.t, kpng, append([]string{"api", "to-local", "userspace", "--node-name=" + nodeName}, platform...)...)
	w.expectAddresses("after kpng.exe started", sets.List(w.expected))
	w.expectPods("kpng.exe proxies", clusterIP, podB, podC)
	p.Kill(w.t)
	w.wine.Run(w.t, kpng, append([]string{"cleanup", "userspace"}, platform...)...)
	w.expectAddresses("after kpng.exe cleaned up", nil)
}

// expectState waits until the service manager reports the state with this name or number.
func (w *world) expectState(name, number string) {
	w.t.Helper()
	state := regexp.MustCompile(`(?m)^\s*STATE\s*:\s*(` + number + `\b|.*` + name + `)`)
	eventually(w.t, "the service is "+name, func() error {
		if out := w.wine.Run(w.t, "sc", "query", "winuserspace"); !state.MatchString(out) {
			return errors.New(out)
		}
		return nil
	})
}

// expectLog checks that the text log contains the lines that the documentation promises.
func expectLog(t *testing.T, log, namespace, clusterIP string) {
	t.Helper()
	name := regexp.QuoteMeta(namespace + "/web")
	ip, pod := regexp.QuoteMeta(clusterIP), `"?10\.244\.0\.\d:8080"?`
	const address, sink = `"?[0-9.]+:\d+"?`, ` sink="winuserspace" `
	for _, pattern := range []string{
		`"Adding new service"` + sink + `servicePortName="` + name + `:http" protocol="TCP" portNum=80`,
		`"Proxying for service"` + sink + `servicePortName="` + name + `:http" protocol="TCP" address="?` + ip + `:80`,
		`"Accepted TCP connection from remote"` + sink + `remoteAddress=` + address + ` localAddress="?` + ip + `:80`,
		`"NextEndpoint for service"` + sink + `servicePortName="` + name + `:http" address=` + address + ` endpoints=\[` + pod,
		`"Mapped service to endpoint"` + sink + `service="` + name + `:http" endpoint=` + pod,
		`"Creating proxy between remote and local addresses"` + sink + `inRemoteAddress=` + address + ` inLocalAddress=` + address + ` outLocalAddress=` + address + ` outRemoteAddress=` + pod,
		`"Copying remote address bytes"` + sink + `direction="to backend" sourceRemoteAddress=` + address + ` destinationRemoteAddress=` + pod,
		`"Copying remote address bytes"` + sink + `direction="from backend" sourceRemoteAddress=` + pod + ` destinationRemoteAddress=` + address,
		`"Copied remote address bytes"` + sink + `bytes=5 direction="to backend" sourceRemoteAddress=` + address + ` destinationRemoteAddress=` + pod,
		`"Copied remote address bytes"` + sink + `bytes=16 direction="from backend" sourceRemoteAddress=` + pod + ` destinationRemoteAddress=` + address,
		`"Stopping service"` + sink + `service="` + regexp.QuoteMeta(namespace) + `/refused"`,
	} {
		if !regexp.MustCompile(pattern).MatchString(log) {
			t.Errorf("the log has no line like\n%s", pattern)
		}
	}
}
