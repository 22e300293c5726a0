// SPDX-License-Identifier: Apache-2.0

// Package sysctl compares numeric settings of the Linux kernel with the values that a
// service proxy needs.
package sysctl

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/kpng-project/kpng/api"
	"k8s.io/klog/v2"
)

// Root is a folder that contains kernel settings as files.
type Root string

// Kernel is the Root of the running kernel. Network settings are the settings of the
// calling thread's network namespace.
const Kernel Root = "/proc/sys"

// Setting is a kernel setting and the value that it should have.
type Setting struct {
	// Name is the name of the setting, such as net.ipv4.ip_forward.
	Name  string
	Value int
	// AtLeast is true if a larger value is also correct.
	AtLeast bool
	// Reason explains the value in log messages.
	Reason string
	// Family is the IP family whose services need the setting. Default: both.
	Family api.Family
}

// Accepts reports whether a value is correct.
func (s *Setting) Accepts(value int) bool { return value == s.Value || s.AtLeast && value > s.Value }

// Forwarding has the settings that make this node forward packets. Without them, traffic
// from other hosts does not reach pods.
var Forwarding = []Setting{
	{Name: "net.ipv4.ip_forward", Value: 1, Family: api.IPv4, Reason: "traffic from elsewhere reaches pods"},
	{Name: "net.ipv6.conf.all.forwarding", Value: 1, Family: api.IPv6, Reason: "traffic from elsewhere reaches pods"},
}

// StrictARP has settings for ARP. With them, the node does not answer ARP requests for
// addresses of services if the addresses are on another interface.
var StrictARP = []Setting{
	{Name: "net.ipv4.conf.all.arp_ignore", Value: 1, Reason: "the node does not answer ARP requests for addresses of services"},
	{Name: "net.ipv4.conf.all.arp_announce", Value: 2, Reason: "the node does not announce addresses of services by ARP"},
}

// IPVS has the settings of IPVS. They exist while the module ip_vs is loaded.
var IPVS = []Setting{
	{Name: "net.ipv4.vs.conntrack", Value: 1, Reason: "connections through IPVS can be masqueraded"},
	{Name: "net.ipv4.vs.conn_reuse_mode", Value: 1, Reason: "a client that uses a port again gets a new endpoint"},
	{Name: "net.ipv4.vs.expire_nodest_conn", Value: 1, Reason: "clients of removed endpoints get another one"},
}

func (r Root) file(name string) string {
	return filepath.Join(string(r), strings.ReplaceAll(name, ".", "/"))
}

// Read returns the value of a setting. Its error wraps [fs.ErrNotExist] if the kernel
// does not have the setting.
func (r Root) Read(name string) (int, error) {
	text, err := os.ReadFile(r.file(name))
	if err != nil {
		return 0, fmt.Errorf("read sysctl %s: %w", name, err)
	}
	value, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0, fmt.Errorf("read sysctl %s: %w", name, err)
	}
	return value, nil
}

// CheckWrite returns an error if this process cannot write a setting. It changes nothing.
func (r Root) CheckWrite(name string) error {
	f, err := os.OpenFile(r.file(name), os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("write sysctl %s: %w", name, err)
	}
	return f.Close()
}

// Apply compares settings with the kernel's values. If set is true, it corrects wrong
// values and logs the result; otherwise it only logs wrong values. It ignores settings
// that the kernel does not have, for example settings of IPv6 if IPv6 is turned off. It
// returns the names of the settings that still have wrong values.
func (r Root) Apply(ctx context.Context, settings []Setting, set bool) (wrong []string) {
	for _, s := range settings {
		log := klog.LoggerWithValues(klog.FromContext(ctx), "sysctl", s.Name, "wanted", s.Value, "reason", s.Reason)
		value, err := r.Read(s.Name)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			wrong = append(wrong, s.Name)
			log.Error(err, "Cannot read a kernel setting")
		case s.Accepts(value):
		case !set:
			wrong = append(wrong, s.Name)
			log.Info("Kernel setting has another value than services need", "value", value)
		default:
			if err := os.WriteFile(r.file(s.Name), []byte(strconv.Itoa(s.Value)), 0); err != nil {
				wrong = append(wrong, s.Name)
				log.Error(err, "Cannot change a kernel setting; set it on the node", "value", value)
			} else {
				log.Info("Kernel setting changed", "before", value)
			}
		}
	}
	return wrong
}
