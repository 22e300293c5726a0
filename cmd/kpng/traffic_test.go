// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"regexp"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/sink/sinktest"
)

// serveTraffic runs a proxy in userspace, for the service default/web with one endpoint. It
// returns the addresses of the service, of the endpoint and of the status page.
func serveTraffic(t *testing.T, args ...string) (service, endpoint, status string) {
	t.Helper()
	pod, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pod.Close() })
	go func() {
		for {
			c, err := pod.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				io.Copy(c, c)
			}()
		}
	}()
	service, endpoint, status = freeAddress(t), pod.Addr().String(), freeAddress(t)
	state := cluster.New(cluster.Options{Resumable: true}) // a file cannot have loopback addresses
	svc := sinktest.Service("web", fmt.Sprintf("127.0.0.1 http=%d>%d", netip.MustParseAddrPort(service).Port(), netip.MustParseAddrPort(endpoint).Port()))
	state.Update(func(tx *cluster.Tx) {
		tx.SetService(svc)
		for _, slice := range sinktest.Slices(svc, "127.0.0.1") {
			tx.SetSlice(slice)
		}
		tx.SetNode(&api.Node{Name: "here"})
	})
	state.SetSynced()
	start(t, append([]string{"api", "to-local", "userspace", "--api", serveState(t, state), "--node-name=here", "--add-addresses=false", "--no-health-checks", "--healthz-bind-address", status}, args...)...)
	eventually(t, "the proxy is ready", func() bool { code, _ := get(t, "http://"+status+"/readyz"); return code == 200 })
	return service, endpoint, status
}

func TestGetServicesWithStats(t *testing.T) {
	service, endpoint, status := serveTraffic(t, "--stats")
	for range 2 {
		c, err := net.Dial("tcp", service)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close() // both stay open
		if _, err := io.WriteString(c, "hello"); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, make([]byte, 5)); err != nil {
			t.Fatal(err)
		}
	}
	run := func(args ...string) string {
		return mustExecute(t, append([]string{"get", "services", "--stats", "--address", status}, args...)...)
	}
	for _, test := range []struct {
		args []string
		want string
	}{
		{nil, `^NAMESPACE +NAME +PORT +CONNECTIONS +ACTIVE +FROM-CLIENTS +TO-CLIENTS\ndefault +web +http/TCP +2 +2 +10 +10\n$`},
		{[]string{"web"}, `^NAMESPACE .* ENDPOINT\ndefault +web +http/TCP +2 +2 +10 +10 +` + endpoint + `\n$`},
		{[]string{"-o", "json"}, `^{"service":"default/web","port":"http","protocol":"TCP","connections":2,"active":2,"fromClients":10,"toClients":10}\n$`},
		{[]string{"default/web", "-o", "yaml"}, `(?s)^---\nactive: 2\n.*endpoint: ` + endpoint + `\n`},
	} {
		eventually(t, fmt.Sprintf("kpng get services --stats %s prints %s", test.args, test.want), func() bool {
			return regexp.MustCompile(test.want).MatchString(run(test.args...))
		})
	}
}

func TestErrorsOfGetServicesWithStats(t *testing.T) {
	_, _, status := serveTraffic(t)
	for _, test := range []struct{ args, want string }{
		{"--stats --address " + status, "does not count traffic; start it with --stats"},
		{"--stats web --address " + status, "does not count traffic; start it with --stats"},
		{"--stats missing --address " + status, "knows no service default/missing"},
		{"--stats 127.0.0.1:80", "kpng explain"},
		{"--stats --address " + freeAddress(t), "no program answers"},
		{"--stats -i x.yaml", "--stats excludes --manifests"},
		{"--stats -o wide", `--output "wide"`},
		{"--address " + status, "--address needs --stats"},
	} {
		if _, err := execute(t.Context(), append([]string{"get", "services"}, strings.Fields(test.args)...)...); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("kpng get services %s: error %v, want %q", test.args, err, test.want)
		}
	}
}

func TestGetServicesWithStatsReadsAllPages(t *testing.T) {
	pages := map[string]string{
		"":      `{"stats":true,"next":"a/web","services":[{"service":"a/web","traffic":[{"protocol":"TCP","connections":3,"active":-1,"fromClients":-1,"toClients":-1}]}]}`,
		"a/web": `{"stats":true,"services":[{"service":"b/all","traffic":[{"connections":0,"active":1,"fromClients":2,"toClients":3}]}]}`,
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, pages[req.URL.Query().Get("after")])
	}))
	defer s.Close()
	out := mustExecute(t, "get", "services", "--stats", "--address", s.Listener.Addr().String())
	if want := regexp.MustCompile(`(?m)^a +web +TCP +3 +- +- +-\nb +all +all +0 +1 +2 +3\n$`); !want.MatchString(out) {
		t.Errorf("the table is\n%s", out)
	}
}
