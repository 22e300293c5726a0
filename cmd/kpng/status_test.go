// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/internal/report"
)

func TestStatusOfServer(t *testing.T) {
	address, health := newSocket(t), freeAddress(t)
	start(t, "file", "to-api", "-i", explained, "--listen", address, "--healthz-bind-address", health)
	eventually(t, "the server is synced", func() bool {
		out, err := execute(t.Context(), "status", "--address", health)
		return err == nil && strings.Contains(out, "synced,")
	})
	start(t, "api", "to-local", "json", "--api", address, "--node-name=here")
	eventually(t, "the client has all changes", func() bool {
		out, err := execute(t.Context(), "status", "--address", health)
		return err == nil && strings.Contains(out, "1 node, 1 stream; none behind")
	})
	out := mustExecute(t, "status", "--address", health)
	if !regexp.MustCompile(`(?m)^CLIENT'S NODE +CLIENT +CONNECTED +REVISION +BEHIND\nhere +unix +\S.* +[1-9][0-9]* +-$`).MatchString(out) {
		t.Errorf("the status lacks the client:\n%s", out)
	}
	for _, want := range []string{"problem   service default/web does not have 198.51.100.1:80/TCP: default/older owns it", "source    manifests " + explained + ": synced, revision ", "CHANGED SERVICE", "default/web"} {
		if !strings.Contains(out, want) {
			t.Errorf("the status lacks %q:\n%s", want, out)
		}
	}
	if out := mustExecute(t, "status", "--address", health, "web"); !strings.HasPrefix(out, "service default/web on a node without a name") || !strings.Contains(out, "frontends") {
		t.Errorf("status of a service:\n%s", out)
	}
	var r report.Report
	if out := mustExecute(t, "status", "--address", health, "-o", "json"); json.Unmarshal([]byte(out), &r) != nil || len(r.Services) == 0 || r.Clients == nil || r.Clients.Slowest[0].Node != "here" {
		t.Errorf("status as JSON: %s", out)
	}
	if out := mustExecute(t, "status", "--address", health, "-o", "yaml"); !strings.Contains(out, "\nsource:\n") {
		t.Errorf("status as YAML: %s", out)
	}
}

func TestStatusShowsRefusedClients(t *testing.T) {
	address, server := newSocket(t), freeAddress(t)
	start(t, "file", "to-api", "-i", explained, "--listen", address, "--healthz-bind-address", server, "--max-streams-per-peer=1")
	for _, node := range []string{"a", "b"} {
		start(t, "api", "to-local", "json", "--api", address, "--node-name="+node)
	}
	eventually(t, "the status reports the refused client", func() bool {
		out, err := execute(t.Context(), "status", "--address", server)
		return err == nil && regexp.MustCompile(`(?m)^problem +[1-9]\d* connections or streams of clients were refused, the last one because unix has 1 streams, the maximum$`).MatchString(out)
	})
}

func TestStatusShowsRefusedServices(t *testing.T) {
	address, server, client := newSocket(t), freeAddress(t), freeAddress(t)
	start(t, "file", "to-api", "-i", explained, "--listen", address, "--healthz-bind-address", server, "--max-service-elements=9")
	start(t, "api", "to-local", "json", "--api", address, "--node-name=here", "--healthz-bind-address", client, "--max-service-elements=6")
	for _, test := range []struct{ name, address, problem string }{
		{"server", server, "service default/web is not served as written: too large: it needs 10 elements, more than the limit of 9: 4 of addresses × ports, 5 of endpoints × ports, 1 source ranges"},
		// The server serves the service with fewer endpoints, one of which is not usable.
		{"client", client, "service default/web is not served as written: too large: it needs 8 elements, more than the limit of 6"},
	} {
		eventually(t, test.name+" reports the service", func() bool {
			out, err := execute(t.Context(), "status", "--address", test.address)
			return err == nil && strings.Contains(out, "problem   "+test.problem)
		})
		out := mustExecute(t, "status", "--address", test.address)
		if sinks := strings.Contains(out, "REFUSED"); sinks != (test.name == "client") || sinks && !regexp.MustCompile(`(?m)^json .* 1$`).MatchString(out) {
			t.Errorf("sinks of the %s:\n%s", test.name, out)
		}
		if out := mustExecute(t, "status", "--address", test.address, "web"); !strings.HasPrefix(out, "this service is not served as written: too large: it needs ") {
			t.Errorf("status of the service at the %s:\n%s", test.name, out)
		}
	}
}

func TestStatusShowsFailures(t *testing.T) {
	failing := report.Failure{Service: "default/web", Error: "no\nspace", Failures: 3}
	r := report.Report{Problems: []string{"sink nftables fails"}, Sinks: []report.Sink{{Name: "nftables"}, {Name: "health"}}}
	for range 25 {
		r.Sinks[0].Failing++
		r.Sinks[0].FailingServices = append(r.Sinks[0].FailingServices, failing)
	}
	var out strings.Builder
	if err := printReport(&out, &r); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(out.String(), "no space"); n != maxFailingShown || !strings.Contains(out.String(), "5 more failures") || !strings.Contains(out.String(), "problem   sink nftables fails") {
		t.Errorf("%d failures in\n%s", n, out.String())
	}
	out.Reset()
	body, err := json.Marshal(report.ServiceReport{Text: "explanation", Failures: []report.Failure{failing}})
	if err != nil {
		t.Fatal(err)
	}
	if err := printStatus(&out, body, "text", true); err != nil || !strings.HasSuffix(out.String(), "explanation") || !strings.Contains(out.String(), "failed 3 times: no\nspace") {
		t.Errorf("error %v, text %s", err, out.String())
	}
}

func TestStatusErrorsSayWhatToDo(t *testing.T) {
	answer := func(code int, contentType string) string {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", contentType)
			w.WriteHeader(code)
			w.Write([]byte("{}"))
		}))
		t.Cleanup(s.Close)
		return s.Listener.Addr().String()
	}
	for _, test := range []struct {
		name string
		args []string
		want []string
	}{
		{"nothing listens", []string{"--address", freeAddress(t)}, []string{"no program answers", "start kpng with --healthz-bind-address", "--address"}},
		{"kube-proxy", []string{"--address", answer(404, "text/plain")}, []string{"no status page", "kube-proxy", "--address"}},
		{"another program", []string{"--address", answer(200, "text/html")}, []string{"no status page"}},
		{"a refusal", []string{"--address", answer(403, "text/plain")}, []string{"--expose-status", "on the machine"}},
		{"an unknown service", []string{"--address", answer(404, "application/json"), "web"}, []string{"knows no service default/web", "kpng explain"}},
		{"an invalid address", []string{"--address", "10256"}, []string{"--address", "10256"}},
		{"an address instead of a service", []string{"10.0.0.1:80"}, []string{"kpng explain"}},
		{"an invalid output format", []string{"-o", "xml"}, []string{"--output", "xml"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := execute(t.Context(), append([]string{"status"}, test.args...)...)
			if err == nil {
				t.Fatal("no error")
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not contain %q", err, want)
				}
			}
		})
	}
}
