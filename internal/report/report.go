// SPDX-License-Identifier: Apache-2.0

// Package report has the JSON form of the status page, which docs/reference/wire.md
// describes. Package status writes it, and the command kpng status reads it.
package report

import (
	"cmp"
	"net/netip"
	"strconv"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
)

// Report is the JSON response about the whole program.
type Report struct {
	Program  string    `json:"program,omitempty"`
	Time     time.Time `json:"time"`
	Node     string    `json:"node,omitempty"`
	Health   *Health   `json:"health,omitempty"`
	Problems []string  `json:"problems"`
	Source   Source    `json:"source"`
	Sinks    []Sink    `json:"sinks,omitempty"`
	Clients  *Clients  `json:"clients,omitempty"`
	Changes  []Change  `json:"changes,omitempty"`
	Services []Service `json:"services,omitempty"`
	Next     string    `json:"next,omitempty"`
	// Stats reports whether the program counts traffic. StatsError says why the services
	// have no Traffic nevertheless.
	Stats      bool   `json:"stats,omitempty"`
	StatsError string `json:"statsError,omitempty"`
}

// Health is the health of the program, see health.Report.
type Health struct {
	Synced       bool `json:"synced"`
	Stuck        bool `json:"stuck"`
	NodeEligible bool `json:"nodeEligible"`
}

// Source is the state of the program's source.
type Source struct {
	Name       string    `json:"name,omitempty"`
	Synced     bool      `json:"synced"`
	Stale      bool      `json:"stale"`
	Revision   uint64    `json:"revision"`
	LastChange time.Time `json:"lastChange,omitzero"`
	Services   int       `json:"services"`
	Slices     int       `json:"slices"`
	Nodes      int       `json:"nodes"`
	Refused    int       `json:"refused"`
}

// Sink is the state of a sink, as in sink.Status.
type Sink struct {
	Name            string    `json:"name,omitempty"`
	Revision        uint64    `json:"revision"`
	Passes          uint64    `json:"passes"`
	Syncs           uint64    `json:"syncs"`
	LastPass        time.Time `json:"lastPass,omitzero"`
	LastSync        time.Time `json:"lastSync,omitzero"`
	LastProgress    time.Time `json:"lastProgress,omitzero"`
	WaitingSince    time.Time `json:"waitingSince,omitzero"`
	SyncingSince    time.Time `json:"syncingSince,omitzero"`
	Error           string    `json:"error,omitempty"`
	Failures        int       `json:"failures,omitempty"`
	NextAttempt     time.Time `json:"nextAttempt,omitzero"`
	NodeError       string    `json:"nodeError,omitempty"`
	Pending         int       `json:"pending"`
	PendingServices []string  `json:"pendingServices,omitempty"`
	Failing         int       `json:"failing"`
	FailingServices []Failure `json:"failingServices,omitempty"`
}

// Failure is the failure of a service in a sink.
type Failure struct {
	Sink      string    `json:"sink,omitempty"`
	Service   string    `json:"service"`
	Error     string    `json:"error"`
	Failures  int       `json:"failures"`
	NextRetry time.Time `json:"nextRetry"`
}

// Clients summarizes the clients of a server.
type Clients struct {
	Streams       int      `json:"streams"`
	Nodes         int      `json:"nodes"`
	Behind        int      `json:"behind"`
	BehindSeconds float64  `json:"behindSeconds"`
	Slowest       []Client `json:"slowest,omitempty"`
}

// Client is a client of a server.
type Client struct {
	Node          string    `json:"node,omitempty"`
	Peer          string    `json:"peer"`
	Since         time.Time `json:"since"`
	Revision      uint64    `json:"revision"`
	BehindSeconds float64   `json:"behindSeconds"`
}

// Change is the last change of a service.
type Change struct {
	Service  string    `json:"service"`
	Revision uint64    `json:"revision"`
	Time     time.Time `json:"time,omitzero"`
	Deleted  bool      `json:"deleted,omitempty"`
}

// Service is a service in the node's view.
type Service struct {
	Service   string          `json:"service"`
	Type      api.ServiceType `json:"type"`
	Addresses []string        `json:"addresses,omitempty"`
	Ports     []string        `json:"ports,omitempty"`
	Endpoints int             `json:"endpoints"`
	Local     int             `json:"local"`
	Draining  int             `json:"draining,omitempty"`
	Lost      int             `json:"lost,omitempty"`
	Refused   bool            `json:"refused,omitempty"`
	Failing   bool            `json:"failing,omitempty"`
	Traffic   []Traffic       `json:"traffic,omitempty"` // by port
}

// Traffic has the numbers of a service port, or of one of its endpoints. A number is -1 if
// the dataplane does not count it, see backends.Stats.
type Traffic struct {
	TrafficID
	Connections int64 `json:"connections"`
	Active      int64 `json:"active"`
	FromClients int64 `json:"fromClients"`
	ToClients   int64 `json:"toClients"`
}

// TrafficID names a service port, or one of its endpoints. An all-ports service has no port
// and no protocol.
type TrafficID struct {
	Port     string         `json:"port,omitempty"`
	Protocol string         `json:"protocol,omitempty"`
	Endpoint netip.AddrPort `json:"endpoint,omitzero"`
}

// Compare orders by port, protocol and endpoint.
func (id TrafficID) Compare(other TrafficID) int {
	return cmp.Or(cmp.Compare(id.Port, other.Port), cmp.Compare(id.Protocol, other.Protocol), id.Endpoint.Compare(other.Endpoint))
}

// Add adds the numbers of other.
func (t *Traffic) Add(other *Traffic) {
	add := func(to *int64, n int64) {
		if n >= 0 {
			*to = max(*to, 0) + n
		}
	}
	add(&t.Connections, other.Connections)
	add(&t.Active, other.Active)
	add(&t.FromClients, other.FromClients)
	add(&t.ToClients, other.ToClients)
}

// Row returns the port and the four numbers for people.
func (t *Traffic) Row() []string {
	port := t.Protocol
	switch {
	case t.Protocol == "":
		port = "all"
	case t.Port != "":
		port = t.Port + "/" + t.Protocol
	}
	row := []string{port}
	for _, n := range [...]int64{t.Connections, t.Active, t.FromClients, t.ToClients} {
		if n < 0 {
			row = append(row, "-")
		} else {
			row = append(row, strconv.FormatInt(n, 10))
		}
	}
	return row
}

// LocalEndpoints returns the number of endpoints of a view that are on its node.
func LocalEndpoints(view *api.View) int {
	n := 0
	for i := range view.Endpoints {
		if view.Endpoints[i].Local {
			n++
		}
	}
	return n
}

// ServiceReport is the JSON response for one service.
type ServiceReport struct {
	Service     string                `json:"service"`
	Explanation *nodeview.Explanation `json:"explanation"`
	Text        string                `json:"text,omitempty"`
	Refused     string                `json:"refused,omitempty"`
	Failures    []Failure             `json:"failures,omitempty"`
	// Stats and StatsError are those of Report.
	Stats      bool      `json:"stats,omitempty"`
	StatsError string    `json:"statsError,omitempty"`
	Traffic    []Traffic `json:"traffic,omitempty"` // by port and endpoint
}

// Age describes the time t relative to now in a few words.
func Age(now, t time.Time) string {
	d := now.Sub(t)
	switch {
	case t.IsZero():
		return "–"
	case d <= -time.Second:
		return "in " + (-d).Round(time.Second).String()
	case d < time.Second:
		return "now"
	case d < time.Hour:
		return d.Truncate(time.Second).String() + " ago"
	default:
		return t.UTC().Format(time.DateTime) + " UTC"
	}
}
