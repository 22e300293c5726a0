// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendoptions"
)

// Options are the settings of the dataplane. It supports all options of
// [backends.Options].
//
// The names of its chains and sets begin with "KPNG-", or for an instance with
// "KPNG-<Instance>-". Instance has at most 6 letters and digits, because the kernel limits
// the length of names.
//
// The Observer's method Wrote is called after each run of iptables-restore, with the number
// of input lines. Its method Holds gets the number of "chains" of the instance.
type Options struct {
	backends.Options

	// Flavour selects the programs of iptables. The value "nft" selects programs that
	// write to nf_tables, such as iptables-nft-restore. The value "legacy" selects
	// programs that write to ip_tables, such as iptables-legacy-restore. All programs of
	// a node should use the same flavour, because it is not obvious in which order the
	// kernel evaluates rules of different flavours. The value "detect" selects the
	// flavour in which kubelet made its chain KUBE-IPTABLES-HINT or KUBE-KUBELET-CANARY.
	// If neither flavour has such a chain, it selects the flavour with more rules. If
	// both flavours have the same number of rules, it selects the flavour of the program
	// iptables. The image of kube-proxy detects the flavour in the same way. Default:
	// "detect".
	Flavour string

	// WithoutIPSet makes the dataplane use rules in place of sets, even if the program ipset
	// is installed. Default: false.
	WithoutIPSet bool

	// LockWait is how long a change waits for the lock that all iptables programs of flavour
	// legacy share. It is at least one second, and is rounded down to full seconds.
	// Default: 5 s.
	LockWait time.Duration

	// AcceptInvalid makes the dataplane accept forwarded packets that connection tracking
	// cannot assign to a connection. Set it if replies to clients may take another path
	// than their requests. If such packets are accepted, a client may receive packets with
	// an untranslated source: the address of the endpoint in place of the service's
	// address. The client then resets the connection. Default: false, which drops these
	// packets, as kube-proxy does in mode iptables.
	AcceptInvalid bool
}

type public = Options

// options are the public options, and functions that only tests replace.
type options struct {
	public
	// lookPath returns the path of a program, and socket makes a socket that counts rules of
	// flavour legacy. Default: [exec.LookPath] and [unix.Socket].
	lookPath func(name string) (string, error)
	socket   func(domain, typ, protocol int) (fd int, err error)
}

// flavour is a variant of the iptables programs. Both variants have the same syntax, but
// their rules are in different parts of the kernel.
type flavour uint8

// The flavours.
const (
	flavourDetected flavour = iota
	flavourNFT
	flavourLegacy
)

var flavourNames = [...]string{flavourDetected: "detect", flavourNFT: "nft", flavourLegacy: "legacy"}

func (f flavour) String() string { return flavourNames[f] }

// parseFlavour returns the flavour with this name. An empty name means flavourDetected.
func parseFlavour(s string) (flavour, error) {
	for f, name := range flavourNames {
		if s == name {
			return flavour(f), nil
		}
	}
	if s == "" {
		return flavourDetected, nil
	}
	return 0, fmt.Errorf("flavour %q is not detect, nft or legacy", s)
}

var instanceName = regexp.MustCompile(`^[A-Za-z0-9]{0,6}$`)

// complete checks o and fills in the defaults.
func (o *Options) complete() error {
	o.LockWait = cmp.Or(o.LockWait, 5*time.Second)

	errs := []error{backendoptions.Complete(&o.Options, false, "Instance", "MasqueradeMark", "MasqueradeAll", "MasqueradeOutsiders", "ClusterCIDRs", "NodePodCIDRs", "PodInterfaces",
		"AcceptUnknownPorts", "NodeAddresses", "Conntrack", "Sysctls", "Stats", "Observer", "NetNS")}
	if !instanceName.MatchString(o.Instance) {
		errs = append(errs, fmt.Errorf("instance %q must have at most 6 letters and digits", o.Instance))
	}
	_, err := parseFlavour(o.Flavour)
	errs = append(errs, err)
	if o.LockWait < time.Second {
		errs = append(errs, fmt.Errorf("lock wait %s is less than a second", o.LockWait))
	}
	return errors.Join(errs...)
}

// prefix is the beginning of the names of all chains and sets of the instance.
func (o *Options) prefix() string {
	if o.Instance == "" {
		return "KPNG-"
	}
	return "KPNG-" + o.Instance + "-"
}
